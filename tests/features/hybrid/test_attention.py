"""The definition of attention with windows and sinks: cases computed by hand, and the plain definition."""

import math

import pytest
import torch

from nanoinfer.attention import dense
from nanoinfer.attention.cpu import num_blocks_before
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.features.hybrid.attention import HybridReferenceBackend, causal_attention
from tests.attention.test_dense import heads
from tests.helpers.paged_cases import compare, metadata_for


def test_weights_by_hand():
    """Scores ln 3 and 0, for keys at positions 0 and 1: weights 3/4 and 1/4."""
    q = torch.tensor([[[1.0]]])
    k, v = torch.tensor([[[math.log(3)]], [[0.0]]]), torch.tensor([[[8.0]], [[4.0]]])
    assert causal_attention(q, k, v, window=1).item() == pytest.approx(4)
    assert causal_attention(q, k, v, window=2).item() == pytest.approx(7)
    sink = torch.tensor([math.log(4)])  # the weights are 3/8, 1/8 and, for the sink, 4/8
    assert causal_attention(q, k, v, sinks=sink).item() == pytest.approx(3.5)


def test_without_window_and_sinks_it_is_the_plain_definition():
    q, k, v = heads(3, 4, 8), heads(9, 2, 8, seed=1), heads(9, 2, 8, seed=2)
    assert torch.equal(causal_attention(q, k, v), dense.causal_attention(q, k, v))


def test_a_window_leaves_as_many_keys_as_it_has_tokens():
    q, k, v = heads(9, 2, 8), heads(9, 2, 8, seed=1), heads(9, 2, 8, seed=2)
    out = causal_attention(q, k, v, window=4)
    for i in range(9):
        first = max(i - 3, 0)
        torch.testing.assert_close(out[i : i + 1], causal_attention(q[i : i + 1], k[first : i + 1], v[first : i + 1]))


@pytest.mark.parametrize(("position", "window", "expected"), [(9, None, 0), (8, 8, 0), (11, 8, 1), (11, 1, 2)])
def test_the_blocks_before_a_window(position, window, expected):
    assert num_blocks_before(position, window, 4) == expected


def test_the_paged_definition_has_windows_and_sinks():
    sizes = {"block_size": 4, "num_kv_heads": 1, "group": 2, "head_dim": 8}
    for window, has_sinks in ((5, False), (None, True), (5, True)):
        assert compare("reference", [(20, 1), (9, 6)], window=window, has_sinks=has_sinks, **sizes) < 1e-5


def test_a_block_before_the_window_is_not_read_by_the_paged_definition():
    cache = KVCache(num_layers=1, num_blocks=3, block_size=4, num_kv_heads=1, head_dim=8)
    metadata = metadata_for([(9, 1)], 4, 3, torch.Generator().manual_seed(0))
    for pages in cache.pages:
        pages[metadata.block_tables[0, 0]] = float("nan")  # another sequence may have the block
    attend = HybridReferenceBackend().begin_step(cache, metadata)
    assert attend(0, *(heads(1, 1, 8, seed=seed) for seed in range(3)), window=4).isfinite().all()
