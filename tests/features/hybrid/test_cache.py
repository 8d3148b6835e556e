"""Which layers of a model share blocks, and the bytes of its cache, by hand."""

import pytest
import torch

from nanoinfer.features.hybrid.sizes import HybridSizes, KVGroup, kv_groups


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
