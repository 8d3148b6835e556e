"""The tensors of the paged KV cache: write slots, read blocks, copy blocks; and how many blocks fit into a machine.

In: block ids and slots, decided by the block manager. Out: keys and values. It does not know whose they are.

A slot is one token's place: slot = block * block_size + offset. The order of a block's axes is the attention backend's choice:

    "NHD"  [num_blocks, block_size, num_kv_heads, head_dim]   a token's heads lie together (flash-attn)
    "HND"  keys as [num_blocks, num_kv_heads, block_size, head_dim]: a head's tokens lie together (the CPU). Values as
           [num_blocks, num_kv_heads, head_dim, block_size]: what decoding adds up lies together in both
"""

import math
import mmap
import os
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.transfer import integers_on_device

Layout = Literal["NHD", "HND"]

# On a CPU the cache takes at most this much unless kv_cache_memory says otherwise, and never more than half of what is free.
DEFAULT_CPU_MEMORY = 4 * 2**30

_MORE_ON_A_GPU = " or gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs"


class KVCache:
    """One pool of blocks; each block has its keys and values in every layer."""

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
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layout: Layout = layout
        k_axes, v_axes = {
            "NHD": ((block_size, num_kv_heads, head_dim),) * 2,
            "HND": ((num_kv_heads, block_size, head_dim), (num_kv_heads, head_dim, block_size)),
        }[layout]
        # A tensor for each: views of one large tensor would differ in their offset, for which torch.compile compiles anew.
        self._layers = [
            (
                _zeros((num_blocks, *k_axes), dtype, torch.device(device)),
                _zeros((num_blocks, *v_axes), dtype, torch.device(device)),
            )
            for _ in range(num_layers)
        ]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of one layer, each in the cache's layout."""
        return self._layers[layer]

    def write(
        self,
        layer: int,
        slot_mapping: Int[Tensor, "num_tokens"],
        k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> None:
        """Store each token's k and v in its slot."""
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        for pages, values in zip(self._by_slot(layer), (k, v), strict=True):
            pages[blocks, offsets] = values

    def gather(
        self, layer: int, block_table: Int[Tensor, "blocks"], seq_len: int
    ) -> tuple[Float[Tensor, "seq_len num_kv_heads head_dim"], Float[Tensor, "seq_len num_kv_heads head_dim"]]:
        """One sequence's k and v, its tokens in order, copied out of its blocks."""
        k, v = (pages[block_table].flatten(0, 1)[:seq_len] for pages in self._by_slot(layer))
        return k, v

    def _by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values seen as [num_blocks, block_size, num_kv_heads, head_dim], whatever the layout."""
        k, v = self._layers[layer]
        return (k, v) if self.layout == "NHD" else (k.transpose(1, 2), v.permute(0, 3, 1, 2))

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, in every layer, all (from, to) pairs at once."""
        device = self._layers[0][0].device
        sources, targets = integers_on_device([list(column) for column in zip(*copies, strict=True)], device)
        for pages in chain.from_iterable(self._layers):
            pages[targets] = pages[sources]


def bytes_per_block(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """2 (k and v) * layers * tokens * heads * head_dim * bytes of a number.

    >>> bytes_per_block(num_layers=12, block_size=16, num_kv_heads=12, head_dim=64, dtype=torch.float32)
    1179648
    """
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def blocks_that_fit(
    config: EngineConfig, block_bytes: int, block_size: int, max_len: int, device: torch.device, *, step_bytes: int = 0
) -> int:
    """As many blocks as the memory holds, and no more than max_num_seqs sequences of max_len could use.

    step_bytes: kept free on a GPU for what a step needs beside weights and cache.
    Raises: InvalidValueError if not one block fits.
    """
    memory = memory_for_cache(device, config.cache.kv_cache_memory, config.cache.gpu_memory_utilization, step_bytes=step_bytes)
    num_blocks = min(memory // block_bytes, config.scheduler.max_num_seqs * -(-max_len // block_size))
    if num_blocks < 1:
        raise InvalidValueError(
            f"the KV cache may take {memory} bytes, less than one block of {block_size} tokens ({block_bytes} bytes); "
            f"raise kv_cache_memory{_MORE_ON_A_GPU if device.type == 'cuda' else ''}, or lower block_size"
        )
    return num_blocks


def memory_for_cache(
    device: torch.device, kv_cache_memory: int | None, gpu_memory_utilization: float, *, step_bytes: int = 0
) -> int:
    """How many bytes the cache may take: what was asked for, or what the machine can spare. Call it with the weights loaded.

    Raises: InvalidValueError if more was asked for than is free.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        spare = int(total * gpu_memory_utilization) - (total - free) - step_bytes
        way_out = "lower kv_cache_memory, or leave it out"
    else:
        free = available_cpu_memory()
        spare = min(DEFAULT_CPU_MEMORY, free // 2)
        way_out = "lower kv_cache_memory, or leave it out to take at most half of what is free"
    if kv_cache_memory is None:
        return max(spare, 0)
    if kv_cache_memory > free:
        raise InvalidValueError(f"kv_cache_memory is {kv_cache_memory} bytes, but {free} are free on {device}; {way_out}")
    return kv_cache_memory


def available_cpu_memory() -> int:
    """Bytes that can be taken without swapping, within the limit of the container, where there is one (cgroup v2)."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: half of the machine's memory, or where not even that can be asked, 8 GiB
        can_ask = hasattr(os, "sysconf")
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if can_ask else 2 * DEFAULT_CPU_MEMORY
    try:
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        file_cache = int(stat["inactive_file"]) + int(stat["active_file"])  # counted as used, and given up when needed
        available = min(available, limit - used + file_cache)
    except (OSError, ValueError, KeyError):  # no container, or "max": no limit
        pass
    return max(available, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on a CPU take memory only page by page, as they are first written (torch.zeros takes all of it at once).

    The pages are huge where the system has such (Linux: 2 MiB): 128 MiB were taken in 7 ms so, and in 46 ms in small ones.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # forks share nothing
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
