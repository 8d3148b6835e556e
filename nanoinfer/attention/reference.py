"""Paged attention by its definition, in plain torch, on any device: write, then gather each sequence and attend densely.

It is slow and easy to verify. The fast backends are tested against it.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.dense import causal_attention
from nanoinfer.attention.kv_cache import KVCache, Layout


class ReferenceBackend:
    """Supports every device, dtype and size."""

    layout: Layout = "NHD"
    default_block_size = 16
    supports_cuda_graph = False

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because nothing is compiled."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return None

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return partial(paged_attention, cache, metadata)


def paged_attention(
    cache: KVCache,
    metadata: AttentionMetadata,
    layer: int,
    q: Float[Tensor, "num_tokens num_heads head_dim"],
    k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
) -> Float[Tensor, "num_tokens num_heads head_dim"]:
    """Store k and v, then attend over each sequence of the step in turn."""
    cache.write(layer, metadata.slot_mapping, k, v)
    out = torch.empty_like(q)
    starts = metadata.query_start_loc_cpu
    for i, seq_len in enumerate(metadata.seq_lens_cpu):
        queries = slice(starts[i], starts[i + 1])
        keys, values = cache.gather(layer, metadata.block_tables[i], seq_len)
        out[queries] = causal_attention(q[queries], keys, values)
    return out
