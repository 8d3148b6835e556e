"""Keys and values as 8-bit integers with a scale for each head."""

import pytest
import torch

from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.features.int8_cache.cache import Int8Cache, SplitInt8Cache, numbers_of, quantized_heads
from nanoinfer.features.int8_cache.sizes import stored_in
from tests.attention.test_kv_cache import heads

CACHES = pytest.mark.parametrize(("cache_class", "layout"), [(Int8Cache, "HND"), (Int8Cache, "NHD"), (SplitInt8Cache, "NHD")])
SIZES = {"num_layers": 2, "num_blocks": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 8 + 4, "dtype": torch.int8}


@CACHES
def test_what_is_read_is_what_was_written_rounded(cache_class, layout):
    cache = cache_class(**SIZES, layout=layout)
    k, v = heads(6), heads(6, seed=1)
    cache.write(1, torch.tensor([12, 13, 14, 15, 4, 5]), k, v)  # blocks 3 and 1
    rounded = [numbers_of(quantized_heads(x)) for x in (k, v)]
    found = cache.gather(1, torch.tensor([3, 1]), 6)
    assert all(torch.equal(one, other) for one, other in zip(found, rounded, strict=True))
    by_block = cache.gather_blocks(1, torch.tensor([[3, 1]]))
    for blocks, expected in zip(by_block, rounded, strict=True):
        in_order = blocks[0] if layout == "NHD" else blocks[0].transpose(1, 2)
        assert torch.equal(in_order.flatten(0, 1)[:6], expected)
    cache.copy_blocks([(3, 0), (1, 2)])  # the blocks of a fork, with their scales
    assert all(map(torch.equal, cache.gather(1, torch.tensor([0, 2]), 6), rounded))
    assert sum(tensor.nbytes for tensor in cache.tensors()) == 5 * CacheSizes(2, 2, 8 + 4).bytes_per_block(4, torch.int8)


def test_a_stored_head_has_its_scale_after_it():
    sizes = CacheSizes(3, 2, 8)
    assert stored_in(sizes, torch.int8).bytes_per_token(torch.int8) == 3 * 2 * 2 * (8 + 4)
    assert stored_in(sizes, torch.bfloat16) is sizes


def test_a_head_in_8_bits_is_integers_and_their_scale():
    heads = torch.tensor([[[0.0, 100.0, -254.0]], [[0.0, 0.0, 0.0]], [[1.0, float("inf"), 0.0]]])
    quantized = quantized_heads(heads)
    assert quantized[0, 0, :3].tolist() == [0, 50, -127]
    assert quantized[0, 0, 3:].clone().view(torch.float32).item() == 2.0
    assert torch.equal(numbers_of(quantized[:2]), heads[:2])
    assert numbers_of(quantized[2:]).isnan().any()  # which the sequence ends with
