"""The definition of attention with windows and sinks, dense and paged. It is the oracle of the tests.

dense.py and reference.py have the definition without them. Two options of some models change which keys count, and by how much:

window    query i attends to keys i - window + 1 .. i only. Source: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150
sinks     each head has an extra key, with this score and a value of 0, so that the weights of the others sum to less than 1.
          Source: https://arxiv.org/abs/2508.10925 (gpt-oss), after Xiao et al. 2023, https://arxiv.org/abs/2309.17453
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.cpu import num_blocks_before
from nanoinfer.attention.dense import DenseAttention, Keys, Queries, Sinks, Window
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.features.hybrid.states import Advance


class HybridDenseAttention(DenseAttention):
    """DenseAttention with windows, sinks and states.

    state_shapes: the shapes of a state's tensors in one layer.
    """

    def __init__(self, state_shapes: tuple[tuple[int, ...], ...] = ()) -> None:
        self._state_shapes = state_shapes

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, *, window: Window = None, sinks: Sinks = None) -> Queries:
        return causal_attention(q, k, v, window, sinks)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        state = tuple(torch.zeros(1, *shape, device=rows[0].device) for shape in self._state_shapes)
        return advance(state, *(x.unsqueeze(0) for x in rows))[0].squeeze(0)


class NoAttention(HybridDenseAttention):
    """Computes no attention."""

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, **options: object) -> Queries:
        return q.contiguous()


def causal_attention(
    q: Float[Tensor, "num_tokens num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
    window: Window = None,
    sinks: Sinks = None,
) -> Float[Tensor, "num_tokens num_heads head_dim"]:
    """Attend with the last num_tokens of a sequence's seq_len tokens, as dense.causal_attention does.

    window: in tokens. None: no window. sinks: the score of each head's sink. None: no sinks.
    """
    num_tokens, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    k = k.repeat_interleave(num_heads // num_kv_heads, dim=1)  # [seq_len, num_heads, head_dim]
    v = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * head_dim**-0.5  # [num_heads, num_tokens, seq_len]
    visible = torch.ones(num_tokens, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - num_tokens)
    if window is not None:
        visible = visible.triu(seq_len - num_tokens - window + 1)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, num_tokens, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :seq_len]
    return torch.einsum("hij,jhd->ihd", weights, v.float()).to(q.dtype)


class HybridReferenceBackend(ReferenceBackend):
    """The ReferenceBackend with windows and sinks."""

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return partial(paged_attention, cache, metadata)


def paged_attention(
    cache: KVCache, metadata: AttentionMetadata, layer: int, q: Queries, k: Keys, v: Keys, **options: Any
) -> Queries:
    """Do what reference.paged_attention does, with a window and sinks as options. Blocks before the window are not read."""
    cache.write(layer, metadata.slot_mapping, k, v)
    out = torch.empty_like(q)
    starts = metadata.query_start_loc_cpu
    for i, seq_len in enumerate(metadata.seq_lens_cpu):
        queries = slice(starts[i], starts[i + 1])
        skipped = num_blocks_before(seq_len - len(q[queries]), options.get("window"), cache.block_size)
        keys, values = cache.gather(layer, metadata.block_tables[i, skipped:], seq_len - skipped * cache.block_size)
        out[queries] = causal_attention(q[queries], keys, values, **options)
    return out
