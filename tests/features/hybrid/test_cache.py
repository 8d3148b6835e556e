"""The cache of a model whose layers form groups or keep states, and which layers share blocks, by hand."""

from types import SimpleNamespace

import pytest
import torch

from nanoinfer.features.hybrid.cache import HybridCache, make_states
from nanoinfer.features.hybrid.groups import GroupedAttend
from nanoinfer.features.hybrid.sizes import HybridSizes, KVGroup, kv_groups
from tests.attention.test_kv_cache import SIZES, heads


def test_layers_of_two_groups_have_the_same_place_in_other_blocks():
    """Layers 0 and 1 are in groups of one layer each, so a block has one place."""
    cache, calls = HybridCache(num_groups=2, states=[], num_layers=1, **SIZES), []

    class Backend:
        def begin_step(self, cache, metadata):
            return lambda layer, *heads, **options: calls.append((metadata, layer))

    attend = GroupedAttend(cache, Backend(), ("first", "second"), kv_groups([8, None]))
    for layer in range(2):
        attend(layer, *[heads(1)] * 3)
    assert calls == [("first", 0), ("second", 0)]
    assert len(cache.pages) == 2  # keys and values


def test_a_state_has_a_slot_more_for_the_beginning():
    states = make_states(2, 3, ((2, 4), (5,)))
    assert [part.shape for part in states[1]] == [(4, 2, 4), (4, 5)]
    assert len(HybridCache(num_groups=1, states=states, num_layers=1, **SIZES).tensors()) == 2 + 4


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None, None], [KVGroup(None, (0, 1))]),
        ([8, None, 8, None], [KVGroup(8, (0, 2)), KVGroup(None, (1, 3))]),
        ([8, 8, 8, None], [KVGroup(8, (0,)), KVGroup(8, (1,)), KVGroup(8, (2,)), KVGroup(None, (3,))]),
        ([8, 8, 8, 4, 4], [KVGroup(8, (0, 1)), KVGroup(8, (2,)), KVGroup(4, (3, 4))]),
    ],
    ids=str,
)
def test_layers_are_groups_of_as_many_as_the_rarest_kind_has(windows, expected):
    assert list(kv_groups(windows)) == expected


def test_sizes_by_hand():
    sizes = HybridSizes(1, 2, 8, kv_groups([8, 8, None]), True, 3, ((2, 4), (5,)))
    assert sizes.windows == (8, 8, None)
    assert sizes.bytes_per_token(torch.float32) == 3 * 2 * 2 * 8 * 4
    assert sizes.bytes_per_block(16, torch.bfloat16) == 16 * 1 * 2 * 2 * 8 * 2  # a place for one layer
    assert sizes.bytes_per_state == 4 * 3 * (8 + 5)


def test_sizes_of_a_config_count_the_layers_of_the_largest_group():
    config = SimpleNamespace(num_hidden_layers=5, num_key_value_heads=2, head_dim=8, layer_windows=(8, 8, None, 8, None))
    sizes = HybridSizes.of(config)
    assert (sizes.num_layers, sizes.num_attention_layers, len(sizes.groups)) == (2, 5, 3)
