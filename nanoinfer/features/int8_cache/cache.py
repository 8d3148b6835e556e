"""A KV cache whose heads are 8-bit integers with a scale each.

The attention backends cpu and reference read it by `gather` and `gather_blocks`, and kernels read its pages. In those of the
C++ kernels a scale follows its head. Those of the Triton kernels have no scales, so that 16 bytes of a head are read at once.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float32, Int, Int8
from torch import Tensor

from nanoinfer.attention.dense import Keys
from nanoinfer.attention.kv_cache import KVCache, finite_values, pool_of
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


class SplitInt8Cache(KVCache):
    """A KVCache of dtype torch.int8 in the layout "NHD", with the scales of each layer, [num_blocks, num_kv_heads, block_size].

    It takes the bytes of an Int8Cache, and its heads begin at multiples of head_dim bytes.
    """

    def __init__(self, *, head_dim: int, **options: Any) -> None:
        """head_dim: with SCALE_BYTES, as a stored head of an Int8Cache. options: the other arguments of KVCache."""
        super().__init__(head_dim=head_dim - SCALE_BYTES, **options)
        num_blocks, block_size, num_kv_heads, _ = self.pages[0].shape
        shape = num_blocks, num_kv_heads, block_size
        self._pools.append(pool_of(2 * self.num_layers, shape, torch.float32, self.pages[0].device))
        self._scales = [*self._pools[-1]]  # of each layer in turn: those of its keys, and of its values
        self.pages += self._scales

    def scales(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._scales[2 * layer], self._scales[2 * layer + 1]

    def write(self, layer: int, slot_mapping: Int[Tensor, " num_tokens"], k: Keys, v: Keys) -> None:
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, scales, heads in zip(self.layer(layer), self.scales(layer), finite_values(k, v), strict=True):
            pages[blocks, offsets], scale = rounded(heads)
            scales[blocks, :, offsets] = scale[..., 0]

    def gather(self, layer: int, block_table: Int[Tensor, " blocks"], seq_len: int) -> tuple[Keys, Keys]:
        k, v = (blocks[0].flatten(0, 1)[:seq_len] for blocks in self.gather_blocks(layer, block_table[None]))
        return k, v

    def gather_blocks(self, layer: int, block_tables: Int[Tensor, "num_seqs blocks"]) -> tuple[Tensor, Tensor]:
        pairs = zip(super().gather_blocks(layer, block_tables), self.scales(layer), strict=True)
        k, v = (integers.float() * scales[block_tables].transpose(-1, -2).unsqueeze(-1) for integers, scales in pairs)
        return k, v


def with_int8_cache(runtime: Runtime) -> Runtime:
    """Return the runtime with such a cache. Raises: UnsupportedError if the attention backend cannot read it."""
    if not getattr(runtime.backend, "supports_int8_cache", False):
        raise UnsupportedError(
            f"kv_cache_dtype='int8' needs the attention backend cpu, triton or reference, not {runtime.backend_name}; leave it "
            "out, or use another backend"
        )
    cache_class = SplitInt8Cache if runtime.backend.layout == "NHD" else Int8Cache
    return replace(runtime, cache_dtype=torch.int8, cache_class=cache_class, sizes=stored_in(runtime.sizes, torch.int8))


def numbers_of(heads: Int8[Tensor, "*tokens head_dim_plus_4"]) -> Tensor:
    """Invert `quantized_heads`: return the numbers in fp32."""
    scales = heads[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return heads[..., :-SCALE_BYTES].float() * scales


def quantized_heads(heads: Keys) -> Int8[Tensor, "num_tokens num_kv_heads head_dim_plus_4"]:
    """Return the integers of each head, followed by the four bytes of their scale in fp32."""
    integers, scales = rounded(heads)
    return torch.cat((integers, scales.view(torch.int8)), -1)


def rounded(heads: Keys) -> tuple[Int8[Tensor, "*heads head_dim"], Float32[Tensor, "*heads 1"]]:
    """Round each head to integers in -127 .. 127 with a scale.

    A number is scale * integer, and the largest number of a head is exact. If a number of a head is not finite, its scale
    is not finite either, so the whole head becomes NaN.
    Source: a scale for each token, as in Sheng et al. 2023, https://arxiv.org/abs/2303.06865.
    """
    numbers = heads.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)  # 127 / largest would round twice
    integers = (numbers * factors).nan_to_num(0.0).round().to(torch.int8)
    return integers, largest / 127
