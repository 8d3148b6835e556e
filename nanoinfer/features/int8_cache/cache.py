"""A KV cache whose heads are 8-bit integers with a scale each.

The attention backends cpu and reference read it by `gather` and `gather_blocks`, and the C++ kernels read its pages.
"""

from dataclasses import replace

import torch
from jaxtyping import Int, Int8
from torch import Tensor

from nanoinfer.attention.dense import Keys
from nanoinfer.attention.kv_cache import KVCache, finite_values
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.int8_cache.sizes import SCALE_BYTES, stored_in


class Int8Cache(KVCache):
    """A KVCache of dtype torch.int8, whose heads have head_dim bytes, of which the last SCALE_BYTES are the scale."""

    def write(self, layer: int, slot_mapping: Int[Tensor, " num_tokens"], k: Keys, v: Keys) -> None:
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, values in zip(self.by_slot(layer), finite_values(k, v), strict=True):
            pages[blocks, offsets] = quantized_heads(values)

    def gather(self, layer: int, block_table: Int[Tensor, " blocks"], seq_len: int) -> tuple[Keys, Keys]:
        k, v = (numbers_of(pages[block_table].flatten(0, 1)[:seq_len]) for pages in self.by_slot(layer))
        return k, v

    def gather_blocks(self, layer: int, block_tables: Int[Tensor, "num_seqs blocks"]) -> tuple[Tensor, Tensor]:
        k, v = super().gather_blocks(layer, block_tables)
        return numbers_of(k), numbers_of(v)


def with_int8_cache(runtime: Runtime) -> Runtime:
    """Return the runtime with such a cache. Raises: UnsupportedError if the attention backend cannot read it."""
    if not getattr(runtime.backend, "supports_int8_cache", False):
        raise UnsupportedError(
            f"kv_cache_dtype='int8' needs the attention backend cpu or reference, not {runtime.backend_name}; leave it out, or "
            "use device='cpu'"
        )
    return replace(runtime, cache_dtype=torch.int8, cache_class=Int8Cache, sizes=stored_in(runtime.sizes, torch.int8))


def numbers_of(heads: Int8[Tensor, "*tokens head_dim_plus_4"]) -> Tensor:
    """Invert `quantized_heads`: return the numbers in fp32."""
    scales = heads[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return heads[..., :-SCALE_BYTES].float() * scales


def quantized_heads(heads: Keys) -> Int8[Tensor, "num_tokens num_kv_heads head_dim_plus_4"]:
    """Round each head to integers in -127 .. 127, followed by the four bytes of their scale in fp32.

    A number is scale * integer, and the largest number of a head is exact. If a number of a head is not finite, its scale
    is not finite either, so the whole head becomes NaN.
    Source: a scale for each token, as in Sheng et al. 2023, https://arxiv.org/abs/2303.06865.
    """
    numbers = heads.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, 127 / largest, 0.0)
    integers = (numbers * factors).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat((integers, (largest / 127).view(torch.int8)), -1)
