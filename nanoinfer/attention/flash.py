"""Paged attention by the flash-attn package (https://github.com/Dao-AILab/flash-attention), which the user installs.

The package reads pages of 256 slots or a multiple. It requires int32 indices, and aligns the causal mask to the last key: the
last query attends to every key.
"""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.kv_cache import KVCache, Layout
from nanoinfer.attention.torch_varlen import flash_attention_2_unsupported_reason

PAGE_SIZES = 256  # and its multiples


class FlashBackend:
    """The first choice on a GPU, if flash-attn is installed."""

    layout: Layout = "NHD"
    default_block_size = PAGE_SIZES
    supports_cuda_graph = True

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because the package comes with compiled kernels."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if block_size % PAGE_SIZES:
            return f"it requires a block_size in multiples of {PAGE_SIZES}, not {block_size}"
        return flash_attention_2_unsupported_reason(device, dtype, head_dim)

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return _Step(cache, metadata)


class _Step:
    """One step's attend. The decoding sequences come first, one token each."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._cache = cache
        self._metadata = metadata
        self._num_decodes = n = metadata.num_decodes
        self._seq_lens = metadata.seq_lens.int()
        self._block_tables = metadata.block_tables.int()
        self._query_starts = (metadata.query_start_loc[n:] - n).int()
        self._key_starts = pad(self._seq_lens[n:].cumsum(0), (1, 0)).int()  # [num_prefills + 1]

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "num_tokens num_heads head_dim"],
        k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        self._cache.write(layer, self._metadata.slot_mapping, k, v)
        k_pages, v_pages = self._cache.layer(layer)
        n = self._num_decodes
        parts = []
        if n:
            mixed = flash_attn_with_kvcache(
                q[:n].unsqueeze(1),  # [num_seqs, 1 query, num_heads, head_dim]
                k_pages,
                v_pages,
                cache_seqlens=self._seq_lens[:n],
                block_table=self._block_tables[:n],
                causal=True,
            )
            parts.append(mixed.squeeze(1))
        if n < len(self._seq_lens):
            mixed = flash_attn_varlen_func(
                q[n:],
                k_pages,
                v_pages,
                cu_seqlens_q=self._query_starts,
                cu_seqlens_k=self._key_starts,
                max_seqlen_q=self._metadata.max_query_len,
                max_seqlen_k=self._metadata.max_seq_len,
                causal=True,
                block_table=self._block_tables[n:],
            )
            parts.append(mixed)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
