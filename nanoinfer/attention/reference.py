"""The definition of paged attention, in plain torch on any device: write k and v, gather each sequence, attend densely.

It is slow but easy to verify, and the fast backends are tested against it.
"""

from functools import partial

import torch

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.dense import Keys, Queries, causal_attention
from nanoinfer.attention.kv_cache import KVCache, Layout


class ReferenceBackend:
    """The reference backend, which supports every device, dtype and size."""

    layout: Layout = "NHD"
    default_block_size = 16
    supports_cuda_graph = False
    supports_int8_cache = True
    supports_windows = True  # by a subclass, which a model with windows or sinks gets
    supports_sinks = True

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because nothing is compiled."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return None

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return partial(paged_attention, cache, metadata)


def paged_attention(cache: KVCache, metadata: AttentionMetadata, layer: int, q: Queries, k: Keys, v: Keys) -> Queries:
    """Store k and v, then attend over each sequence of the step in turn."""
    cache.write(layer, metadata.slot_mapping, k, v)
    out = torch.empty_like(q)
    starts = metadata.query_start_loc_cpu
    for i, seq_len in enumerate(metadata.seq_lens_cpu):
        queries = slice(starts[i], starts[i + 1])
        keys, values = cache.gather(layer, metadata.block_tables[i], seq_len)
        out[queries] = causal_attention(q[queries], keys, values)
    return out
