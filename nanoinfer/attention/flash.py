"""Paged attention by the flash-attn package (https://github.com/Dao-AILab/flash-attention), which the user installs.

The package reads blocks of 256 slots or a multiple, and requires int32 indices. It aligns the causal mask to the last key, so
the last query attends to every key. Its windows count the keys on either side of a query without the query's own, and it reads
no block that lies wholly before the window. It has no sinks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.dense import Keys, Queries, Sinks, Window
from nanoinfer.attention.kv_cache import KVCache, Layout

BLOCK_SIZE = 256  # and its multiples


class FlashBackend:
    """Requires flash-attn. On an H200 decoding had 0.6 to 0.9 of the speed of TritonBackend (BENCHMARKS.md)."""

    layout: Layout = "NHD"
    default_block_size = BLOCK_SIZE
    supports_cuda_graph = True
    supports_windows = True

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because the package comes with compiled kernels."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
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
        return WindowedFlashAttend(cache, metadata)


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
        k_pages, v_pages = self._cache.by_slot(layer)
        outputs, n = [], self._metadata.num_decodes
        if n:
            queries = q[:n].unsqueeze(1)  # [num_seqs, 1 query, num_heads, head_dim]
            outputs.append(flash_attn_with_kvcache(queries, k_pages, v_pages, **self._decodes, **options).squeeze(1))
        if n < len(self._metadata.seq_lens):
            outputs.append(flash_attn_varlen_func(q[n:], k_pages, v_pages, **self._chunks, **options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class WindowedFlashAttend(FlashAttend):
    """FlashAttend for layers of which some have a window."""

    def __call__(  # type: ignore[override]  # its options are those of the layer
        self, layer: int, q: Queries, k: Keys, v: Keys, *, window: Window = None, sinks: Sinks = None
    ) -> Queries:
        assert sinks is None, "select_backend chooses another backend for layers with sinks"
        options = {} if window is None else {"window_size": (window - 1, 0)}  # keys to the left and to the right
        return super().__call__(layer, q, k, v, **options)
