"""The tensors of the cache: slots and blocks."""

import sys
from pathlib import Path

import pytest
import torch

from nanoinfer.attention.kv_cache import KVCache, finite_values

SIZES = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
LAYOUTS = pytest.mark.parametrize("layout", ["NHD", "HND"])


def heads(num_tokens, seed=0):
    return torch.randn(num_tokens, 2, 8, generator=torch.Generator().manual_seed(seed))


@LAYOUTS
def test_what_is_written_into_slots_is_read_in_the_order_of_the_block_table(layout):
    cache = KVCache(num_layers=2, dtype=torch.float32, device="cpu", layout=layout, **SIZES)
    k, v = heads(6), heads(6, seed=1)
    slots = torch.tensor([3 * 4, 3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 1 * 4, 1 * 4 + 1])  # blocks 3 and 1
    cache.write(1, slots, k, v)
    found = cache.gather(1, torch.tensor([3, 1]), 6)
    assert all(torch.equal(one, other) for one, other in zip(found, (k, v), strict=True))
    assert not cache.gather(0, torch.tensor([3, 1]), 6)[0].any()  # the other layer
    assert not cache.gather(1, torch.tensor([2]), 4)[0].any()  # another block
    assert cache.layer(1)[0].shape == ((5, 4, 2, 8) if layout == "NHD" else (5, 2, 4, 8))


@LAYOUTS
def test_a_copied_block_has_the_tokens_of_every_layer(layout):
    cache = KVCache(num_layers=2, dtype=torch.float32, device="cpu", layout=layout, **SIZES)
    for layer in range(2):
        cache.write(layer, torch.arange(4), heads(4, seed=layer), heads(4, seed=layer + 5))
    cache.copy_blocks([(0, 4), (0, 2)])
    for layer in range(2):
        for block in (2, 4):
            assert torch.equal(cache.gather(layer, torch.tensor([block]), 4)[0], heads(4, seed=layer))
    assert not cache.gather(0, torch.tensor([3]), 4)[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_becomes_0_and_its_key_nan(bad):
    k, v = heads(3), heads(3, seed=1)
    v[1, 0, 5] = bad
    safe_k, safe_v = finite_values(k, v)
    assert (safe_k[1, 0].isnan().all(), safe_v[1, 0].any()) == (True, False)
    assert torch.equal(safe_k[1, 1], k[1, 1])
    assert torch.equal(safe_v[[0, 2]], v[[0, 2]])


def test_copied_blocks_hold_what_their_sources_held_before_any_copy():
    cache = KVCache(num_layers=1, num_blocks=3, block_size=1, num_kv_heads=1, head_dim=1)
    cache.write(0, torch.arange(3), *(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),) * 2)
    cache.copy_blocks([(0, 1), (1, 2)])
    assert cache.layer(0)[0].flatten().tolist() == [1, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_unused_cache_takes_no_memory():
    def anonymous():
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["RssAnon"].split()[0]) * 1024

    before = anonymous()
    cache = KVCache(num_layers=4, num_blocks=1024, block_size=64, num_kv_heads=4, head_dim=64)
    assert sum(pages.nbytes for layer in range(4) for pages in cache.layer(layer)) == 2**29
    assert anonymous() - before < 2**24
    assert cache.layer(3)[1][::100].count_nonzero() == 0
