"""The definition of causal attention, for one sequence whose tokens are all given. It is the oracle of the tests.

scores[i, j] = q_i . k_j / sqrt(head_dim)    for j <= i, else -inf
out_i        = sum_j softmax_j(scores[i]) v_j

Two options of some models change which keys count, and by how much:

window    query i attends to keys i - window + 1 .. i only. Source: Beltagy et al. 2020, https://arxiv.org/abs/2004.05150
sinks     each head has an extra key, with this score and a value of 0, so that the weights of the others sum to less than 1.
          Source: https://arxiv.org/abs/2508.10925 (gpt-oss), after Xiao et al. 2023, https://arxiv.org/abs/2309.17453
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Queries = Float[Tensor, "num_tokens num_heads head_dim"]
Keys = Float[Tensor, "num_tokens num_kv_heads head_dim"]  # also the shape of values
Window = int | None  # in tokens. None: no window
Sinks = Float[Tensor, " num_heads"] | None  # None: no sinks


def with_whole_heads(x: Keys) -> Keys:
    """Return x, or a copy if the heads of a token are not contiguous, as kernels need them. Tokens may be strided."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


class DenseAttention:
    """Attention for `model(input_ids, positions, DenseAttention())`, whose tokens are a single sequence. It stores nothing.

    state_shapes: the shapes of a state's tensors, if other layers keep states (Recur in base.py).
    """

    def __init__(self, state_shapes: tuple[tuple[int, ...], ...] = ()) -> None:
        self._state_shapes = state_shapes

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, *, window: Window = None, sinks: Sinks = None) -> Queries:
        return causal_attention(q, k, v, window, sinks)

    def recur(self, layer: int, advance: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], *rows: Tensor) -> Tensor:
        state = tuple(torch.zeros(1, *shape, device=rows[0].device) for shape in self._state_shapes)
        return advance(state, *(x.unsqueeze(0) for x in rows))[0].squeeze(0)


def causal_attention(
    q: Float[Tensor, "num_tokens num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
    window: Window = None,
    sinks: Sinks = None,
) -> Float[Tensor, "num_tokens num_heads head_dim"]:
    """Attend with the last num_tokens of a sequence's seq_len tokens, computed in fp32 and returned in q's dtype.

    Query i is at position p = seq_len - num_tokens + i and attends to keys 0 .. p, so the causal mask is aligned to the bottom
    right corner of the score matrix.
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
