"""The tensors of the paged KV cache: write slots, read blocks, copy blocks.

In: block ids and slots, chosen by the block manager. Out: keys and values. The cache does not know which sequence owns them.
A slot holds one token: slot = block * block_size + offset. The attention backend chooses the order of a block's axes:

    "NHD"  [num_blocks, block_size, num_kv_heads, head_dim]   a token's heads are contiguous (GPUs)
    "HND"  [num_blocks, num_kv_heads, block_size, head_dim]   a head's tokens are contiguous (CPUs)
"""

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal

import torch
from jaxtyping import Int, Int8, Shaped
from torch import Tensor

from nanoinfer.attention.cache_sizes import SCALE_BYTES, CacheSizes, KVGroup, stored_size
from nanoinfer.attention.dense import Keys
from nanoinfer.system.transfer import integers_on_device

Layout = Literal["NHD", "HND"]
Pages = Shaped[Tensor, "num_blocks num_kv_heads block_size stored_size"]  # a layer's, in HND. stored_size: cache_sizes.py


class KVCache:
    """A pool of blocks, each of which has keys and values in every layer of a KV group.

    A head takes head_dim numbers. With dtype torch.int8 it takes head_dim + 4 bytes, as quantized_heads returns them.
    """

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
        groups: tuple[KVGroup, ...] = (),
        states: "StateCache | None" = None,
    ) -> None:
        """groups: the layers' KV groups. (): a single group without a window. states: None: no layer keeps a state."""
        self.states = states
        self.attached: list[Tensor] = []  # a drafter's tensors for the same tokens
        self.groups = groups or (KVGroup(None, tuple(range(num_layers))),)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout: Layout = layout
        axes = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
        shape = (num_blocks, *axes, stored_size(head_dim, dtype))
        num, device = 2 * max(len(group.layers) for group in self.groups), torch.device(device)
        # All keys and values. On a GPU they are one tensor, so that one kernel copies blocks.
        self._pool = (
            [zeros(shape, dtype, device) for _ in range(num)] if device.type == "cpu" else zeros((num, *shape), dtype, device)
        )
        places = {layer: 2 * place for group in self.groups for place, layer in enumerate(group.layers)}
        self._layers = [(self._pool[places[layer]], self._pool[places[layer] + 1]) for layer in range(num_layers)]

    @classmethod
    def for_model(
        cls, sizes: CacheSizes, *, num_state_slots: int = 0, device: torch.device | str = "cpu", **options: Any
    ) -> "KVCache":
        """Make the cache of a model.

        Args:
            num_state_slots: the number of slots for states, for models whose layers keep states.
            options: the arguments num_blocks, block_size, dtype and layout of KVCache.
        """
        states = None
        if num_layers := sizes.num_state_layers:
            states = StateCache(
                num_layers=num_layers, num_state_slots=num_state_slots, shapes=sizes.state_shapes, device=device
            )
        return cls(
            num_layers=sizes.num_layers,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            groups=sizes.groups,
            states=states,
            device=device,
            **options,
        )

    def tensors(self) -> list[Tensor]:
        """The tensors of all blocks, of the states, and those that are attached."""
        return [*self._pool, *(() if self.states is None else self.states.tensors), *self.attached]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, each in the cache's layout."""
        return self._layers[layer]

    @property
    def pages(self) -> list[Tensor]:
        """The tensors of the blocks, whose first axis counts the blocks. Several layers may share a tensor."""
        return list(self._pool)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def write(self, layer: int, slot_mapping: Int[Tensor, " num_tokens"], k: Keys, v: Keys) -> None:
        """Store each token's k and v, as finite_values returns them, in its slot."""
        k, v = finite_values(k, v)
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, values in zip(self._by_slot(layer), (k, v), strict=True):
            pages[blocks, offsets] = stored(values, pages.dtype)

    def gather(self, layer: int, block_table: Int[Tensor, " blocks"], seq_len: int) -> tuple[Keys, Keys]:
        """Copy one sequence's k and v, its tokens in order, out of its blocks."""
        k, v = (loaded(pages[block_table].flatten(0, 1)[:seq_len]) for pages in self._by_slot(layer))
        return k, v

    def num_blocks_before(self, position: int, window: int | None) -> int:
        """Return the number of a sequence's first blocks that neither the query at this position nor any later query reads."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def _by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of keys and values, [num_blocks, block_size, num_kv_heads, head_dim] in either layout."""
        k, v = self._layers[layer]
        return (k, v) if self.layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer. Of all (from, to) pairs, every block is read before one is written."""
        device = self._pool[0].device
        sources, targets = integers_on_device([list(column) for column in zip(*copies, strict=True)], device)
        if isinstance(self._pool, Tensor) and find_spec("triton"):
            from nanoinfer.attention.triton import copy_blocks

            copy_blocks(self._pool, sources, targets)
        else:
            for pages in self._pool:
                pages[targets] = pages[sources]


class StateCache:
    """A pool of state slots, each of which has the tensors of a state in every layer that keeps a state, in fp32."""

    def __init__(
        self, *, num_layers: int, num_state_slots: int, shapes: Sequence[tuple[int, ...]], device: torch.device | str = "cpu"
    ) -> None:
        """shapes: the shapes of a state's tensors in one layer."""
        self._layers = [
            tuple(zeros((num_state_slots + 1, *shape), torch.float32, torch.device(device)) for shape in shapes)
            for _ in range(num_layers)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer]

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """Return the tensors of one layer, each [num_state_slots + 1, ...]. The last slot holds the state before any token."""
        return self._layers[layer]


def finite_values(k: Keys, v: Keys) -> tuple[Keys, Keys]:
    """Return k and v as they are stored: if a token's v is not finite (fp16 overflow, corrupted weights), v is 0 and k is NaN.

    Attention masks a key by replacing its score by -inf, but masks a value by weight 0, and 0 * NaN is NaN. So a NaN in v would
    reach every query that shares a matrix product with the token, and later every sequence that is given the token's block. A
    NaN in k reaches only the queries that attend to the token, whose sequence then ends with an error.
    """
    if v.device.type == "cpu" and v.sum().isfinite():  # on a GPU, the host would have to wait
        return k, v
    is_finite = v.isfinite().all(-1, keepdim=True)  # [num_tokens, num_kv_heads, 1]
    return k.where(is_finite, float("nan")), v.where(is_finite, 0.0)


def stored(heads: Keys, dtype: torch.dtype) -> Tensor:
    """Return keys or values as a cache of this dtype stores them."""
    return quantized_heads(heads) if dtype == torch.int8 else heads.to(dtype)


def loaded(pages: Tensor) -> Tensor:
    """Invert `stored`: return the cache's numbers, converted to fp32 if they are stored in 8 bits."""
    if pages.dtype != torch.int8:
        return pages
    return pages[..., :-SCALE_BYTES].float() * pages[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(
        torch.float32
    )


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
