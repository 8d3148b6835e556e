"""The bytes of tokens and blocks, by hand, and as many as a cache has."""

import torch

from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.attention.kv_cache import KVCache


def test_sizes_by_hand():
    sizes = CacheSizes(3, 2, 8)
    assert sizes.bytes_per_token(torch.float32) == 3 * 2 * 2 * 8 * 4
    assert sizes.bytes_per_block(16, torch.bfloat16) == 16 * 3 * 2 * 2 * 8 * 2


def test_the_memory_is_as_large_as_the_sizes_say():
    cache = KVCache(num_layers=3, num_kv_heads=2, head_dim=8, num_blocks=5, block_size=4, layout="HND")
    assert sum(pages.nbytes for pages in cache.tensors()) == 5 * CacheSizes(3, 2, 8).bytes_per_block(4, torch.float32)
