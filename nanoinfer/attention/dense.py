"""The definition of causal attention, for one sequence whose tokens are all given. It is the oracle of the tests.

scores[i, j] = q_i . k_j / sqrt(head_dim)    for j <= i, else -inf
out_i        = sum_j softmax_j(scores[i]) v_j
"""

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
    """Attention for `model(input_ids, positions, DenseAttention())`, whose tokens are a single sequence. It stores nothing."""

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys) -> Queries:
        return causal_attention(q, k, v)


def causal_attention(
    q: Float[Tensor, "num_tokens num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
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
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v.float()).to(q.dtype)
