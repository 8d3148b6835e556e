"""Paged attention by FlashAttention 2: the flash-attn package (https://github.com/Dao-AILab/flash-attention), or torch's copy.

The package, which the user installs, is preferred. Without it torch's varlen_attn computes, which reads blocks from torch 2.12
on (https://docs.pytorch.org/docs/2.12/nn.attention.varlen.html).

Both read blocks of 256 slots or a multiple, and require int32 indices. They align the causal mask to the last key, so the last
query attends to every key. Their windows count the keys on either side of a query without the query's own, and they read no
block that lies wholly before the window. They have no sinks.
"""

import logging
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.dense import Keys, Queries, Sinks, Window, with_whole_heads
from nanoinfer.attention.kv_cache import KVCache, Layout

varlen_attn: Any = None
try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
except ModuleNotFoundError as error:
    if error.name != "flash_attn":
        raise
    if find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

logger = logging.getLogger(__name__)

BLOCK_SIZE = 256  # and its multiples


class FlashBackend:
    """Requires flash-attn or torch 2.12. On an H200 decoding had 0.6 to 0.9 of the speed of TritonBackend (BENCHMARKS.md)."""

    layout: Layout = "NHD"
    default_block_size = BLOCK_SIZE
    supports_cuda_graph = True
    supports_windows = True
    library = "flash-attn" if varlen_attn is None else "torch's varlen_attn"

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because both libraries have compiled kernels."""
        logger.info("attention_backend: flash computes by %s", self.library)

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if varlen_attn is not None and "block_table" not in signature(varlen_attn).parameters:
            return f"flash_attn is not installed, and torch {torch.__version__} has no paged attention, which 2.12 has"
        if block_size % BLOCK_SIZE:
            return f"it requires a block_size in multiples of {BLOCK_SIZE}, not {block_size}"
        if device.type != "cuda":
            return f"it runs on cuda only, not on {device}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"it requires an Ampere GPU or a newer one, not {torch.cuda.get_device_name(device)}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it supports float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
        if head_dim > 256 or head_dim % 8:
            return f"it supports a head_dim in multiples of 8 up to 256, not {head_dim}"
        return None

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return (WindowedFlashAttend if varlen_attn is None else VarlenAttend)(cache, metadata)


class FlashAttend:
    """The Attend of one step: a library call for the decoding sequences, and another for the prompt chunks after them."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._cache, self._metadata = cache, metadata
        n, seq_lens, tables = metadata.num_decodes, metadata.seq_lens.int(), metadata.block_tables.int()
        self._decodes = {"cache_seqlens": seq_lens[:n], "block_table": tables[:n], "causal": True}
        self._chunks: dict[str, Any] = {"block_table": tables[n:], "causal": True}
        self._chunks |= {"max_seqlen_q": metadata.max_query_len, "max_seqlen_k": metadata.max_seq_len}
        self._chunks["cu_seqlens_q"] = (metadata.query_start_loc[n:] - n).int()  # [num_chunks + 1]
        self._chunks["cu_seqlens_k"] = F.pad(seq_lens[n:].cumsum(0), (1, 0)).int()  # [num_chunks + 1]

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, **options: Any) -> Queries:
        """Store k and v, then attend. options: further arguments of the library's functions."""
        self._cache.write(layer, self._metadata.slot_mapping, k, v)
        return self._attend(layer, q, **options)

    def _attend(self, layer: int, q: Queries, **options: Any) -> Queries:
        k_pages, v_pages = self._cache.by_slot(layer)
        outputs, n = [], self._metadata.num_decodes
        if n:
            queries = q[:n].unsqueeze(1)  # [num_seqs, 1 query, num_heads, head_dim]
            outputs.append(flash_attn_with_kvcache(queries, k_pages, v_pages, **self._decodes, **options).squeeze(1))
        if n < len(self._metadata.seq_lens):
            outputs.append(flash_attn_varlen_func(q[n:], k_pages, v_pages, **self._chunks, **options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class WindowedFlashAttend(FlashAttend):
    """FlashAttend for layers of which some have a window. Where Triton is installed, one kernel stores k and v."""

    def __call__(  # type: ignore[override]  # its options are those of the layer
        self, layer: int, q: Queries, k: Keys, v: Keys, *, window: Window = None, sinks: Sinks = None
    ) -> Queries:
        assert sinks is None, "select_backend chooses another backend for layers with sinks"
        options = {} if window is None else {"window_size": (window - 1, 0)}  # keys to the left and to the right
        if not has_store_kernel(q.device):
            return super().__call__(layer, q, k, v, **options)
        from nanoinfer.attention.triton import rotate_and_store

        stored = with_whole_heads(k), with_whole_heads(v), *self._cache.layer(layer), self._metadata.slot_mapping
        rotate_and_store(q, None, *stored)
        return self._attend(layer, q, **options)


class VarlenAttend(WindowedFlashAttend):
    """The same by torch's varlen_attn, for which decodes are chunks of one query."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._cache, self._metadata = cache, metadata
        n, seq_lens, tables = metadata.num_decodes, metadata.seq_lens.int(), metadata.block_tables.int()
        self._calls: list[tuple[slice, partial[Any]]] = []  # which tokens, and what attends
        for first, last, tokens, max_q in ((0, n, slice(n), 1), (n, len(seq_lens), slice(n, None), metadata.max_query_len)):
            if first < last:
                starts = (metadata.query_start_loc[first : last + 1] - first).int()
                lens = seq_lens[first:last]
                ends = F.pad(lens.cumsum(0), (1, 0)).int()  # without pages the keys would be in one row, too
                sizes = {"cu_seq_q": starts, "cu_seq_k": ends, "max_q": max_q, "max_k": metadata.max_seq_len, "seqused_k": lens}
                self._calls.append((tokens, partial(varlen_attn, **sizes, block_table=tables[first:last], enable_gqa=True)))

    def _attend(self, layer: int, q: Queries, *, window_size: tuple[int, int] = (-1, 0)) -> Queries:  # type: ignore[override]
        k_pages, v_pages = self._cache.by_slot(layer)
        outputs = [call(q[tokens], k_pages, v_pages, window_size=window_size) for tokens, call in self._calls]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def has_store_kernel(device: torch.device) -> bool:
    """Whether one kernel of attention/triton.py stores keys and values, where torch's operators take about eight."""
    return device.type != "cpu" and find_spec("triton") is not None
