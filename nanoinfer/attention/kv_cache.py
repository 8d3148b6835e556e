"""The tensors of the paged KV cache: write slots, read blocks, copy blocks.

In: block ids and slots, chosen by the block manager. Out: keys and values. The cache does not know which sequence owns them.
A slot holds one token: slot = block * block_size + offset. The attention backend chooses the order of a block's axes:

    "NHD"  [num_blocks, block_size, num_kv_heads, head_dim]   a token's heads are contiguous (GPUs)
    "HND"  [num_blocks, num_kv_heads, block_size, head_dim]   a head's tokens are contiguous (CPUs)
"""

import math
import mmap
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.dense import Keys
from nanoinfer.system.transfer import integers_on_device

Layout = Literal["NHD", "HND"]


class KVCache:
    """A pool of blocks, each of which has keys and values in every layer."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layout: Layout = "NHD",
    ) -> None:
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.layout: Layout = layout
        axes = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
        shape, device = (num_blocks, *axes, head_dim), torch.device(device)
        self._pools = [pool_of(2 * num_layers, shape, dtype, device)]
        self.pages = [*self._pools[0]]  # of each layer in turn: its keys, and its values
        self._layers = list(zip(self.pages[::2], self.pages[1::2], strict=True))

    def tensors(self) -> list[Tensor]:
        """The tensors of everything that the cache keeps."""
        return self.pages

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, each in the cache's layout."""
        return self._layers[layer]

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors of one layer's keys and values, if these are integers (features/int8_cache/)."""
        return None, None

    def write(self, layer: int, slot_mapping: Int[Tensor, " num_tokens"], k: Keys, v: Keys) -> None:
        """Store each token's k and v, as finite_values returns them, in its slot."""
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, values in zip(self.by_slot(layer), finite_values(k, v), strict=True):
            pages[blocks, offsets] = values.to(pages.dtype)

    def gather(self, layer: int, block_table: Int[Tensor, " blocks"], seq_len: int) -> tuple[Keys, Keys]:
        """Copy one sequence's k and v, its tokens in order, out of its blocks."""
        k, v = (pages[block_table].flatten(0, 1)[:seq_len] for pages in self.by_slot(layer))
        return k, v

    def gather_blocks(self, layer: int, block_tables: Int[Tensor, "num_seqs blocks"]) -> tuple[Tensor, Tensor]:
        """Copy the k and v of whole blocks, [num_seqs, blocks, ...] with the axes of a block in the cache's layout."""
        k_pages, v_pages = self.layer(layer)
        return k_pages[block_tables], v_pages[block_tables]

    def by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of keys and values, [num_blocks, block_size, num_kv_heads, head_dim] in either layout."""
        k, v = self._layers[layer]
        return (k, v) if self.layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer. Of all (from, to) pairs, every block is read before one is written."""
        device = self.pages[0].device
        sources, targets = integers_on_device([list(column) for column in zip(*copies, strict=True)], device)
        for pool in self._pools:
            if isinstance(pool, Tensor) and find_spec("triton"):
                from nanoinfer.attention.triton import copy_blocks

                copy_blocks(pool, sources, targets)
            else:
                for pages in pool:
                    pages[targets] = pages[sources]


def finite_values(k: Keys, v: Keys) -> tuple[Keys, Keys]:
    """Return k and v as they are stored: where a v is not finite (fp16 overflow, corrupted weights), v is 0 and k is NaN.

    Attention masks a key by replacing its score by -inf, but masks a value by weight 0, and 0 * NaN is NaN. So a NaN in v would
    reach every query that shares a matrix product with the token, and later every sequence that is given the token's block. A
    NaN in k reaches only the queries that attend to the token, whose sequence then ends with an error.
    """
    if v.device.type == "cpu" and v.sum().isfinite():  # on a GPU, the host would have to wait
        return k, v
    is_finite = v.isfinite().all(-1, keepdim=True)  # [num_tokens, num_kv_heads, 1]
    return k.where(is_finite, float("nan")), v.where(is_finite, 0.0)


def pool_of(num: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor] | Tensor:
    """Return so many tensors of zeros. On a GPU they are one tensor, so that one kernel copies blocks."""
    if device.type == "cpu":
        return [zeros(shape, dtype, device) for _ in range(num)]
    return zeros((num, *shape), dtype, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU, each page takes memory when it is first written (torch.zeros takes all of it at once).

    They use the system's huge pages if it has them (Linux: 2 MiB): writing 128 MiB took 7 ms with them and 46 ms without.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}  # forks share nothing
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    if sys.platform == "linux":
        with suppress(OSError):  # the kernel may lack huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
