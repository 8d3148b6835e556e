"""Gated DeltaNet: a layer that keeps a state of fixed size instead of keys and values.

A head's state S is a matrix [key_dim, value_dim], an associative memory: S^T k is the value that it holds for the key k. Each
token fades the memory by exp(g), corrects the value that it holds for the token's key by the share beta, and reads with its
query:

    S   <- exp(g_t) S                                g_t <= 0
    S   <- S + k_t (beta_t (v_t - S^T k_t))^T        the delta rule: write only what the memory does not hold yet
    o_t  = S^T q_t

`gated_delta_rule` is this definition. `gated_delta_rule_in_chunks` gives the same numbers, up to rounding, by matrix products.
A short convolution mixes each token's q, k and v with those of the tokens before it, so the layer's state is S and the latest
inputs of the convolution. All of it is in fp32.

Source: Yang, Kautz and Hatamizadeh 2024, https://arxiv.org/abs/2412.06464. The chunks: Yang et al. 2024,
https://arxiv.org/abs/2406.06484, section 3.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nanoinfer.features.hybrid.states import Recur
from nanoinfer.models.layers import Untraced

Keys = Float[Tensor, "num_seqs num_tokens heads key_dim"]  # also the shape of queries
Values = Float[Tensor, "num_seqs num_tokens heads value_dim"]
Gates = Float[Tensor, "num_seqs num_tokens heads"]
Memory = Float[Tensor, "num_seqs heads key_dim value_dim"]

CHUNK = 64  # the number of tokens whose corrections are solved for at once


def gated_delta_rule(memory: Memory, q: Keys, k: Keys, v: Values, log_decay: Gates, beta: Gates) -> tuple[Values, Memory]:
    """Compute the outputs of some tokens and the memory after them, one token after the other: the definition."""
    outs = []
    for t in range(q.shape[1]):
        memory = memory * log_decay[:, t].exp()[..., None, None]
        held = (memory * k[:, t].unsqueeze(-1)).sum(-2)  # [num_seqs, heads, value_dim]
        correction = beta[:, t].unsqueeze(-1) * (v[:, t] - held)
        memory = memory + k[:, t].unsqueeze(-1) * correction.unsqueeze(-2)
        outs.append((memory * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, 1), memory


def gated_delta_rule_in_chunks(
    memory: Memory, q: Keys, k: Keys, v: Values, log_decay: Gates, beta: Gates
) -> tuple[Values, Memory]:
    """Compute the same as gated_delta_rule, CHUNK tokens at a time.

    With S the memory before a chunk, and G_t the sum of the chunk's log decays up to token t, the correction of token t is

        u_t = beta_t (v_t - exp(G_t) S^T k_t - sum_{j<t} exp(G_t - G_j) (k_t . k_j) u_j)

    because the memory that token t corrects is S plus the corrections of the chunk's earlier tokens, faded since then. For
    all tokens of the chunk these equations form a triangular system.
    """
    outs = []
    for start in range(0, q.shape[1], CHUNK):
        # [num_seqs, heads, num_tokens, dim] and [num_seqs, heads, num_tokens, 1]
        queries, keys, values = (x[:, start : start + CHUNK].transpose(1, 2) for x in (q, k, v))
        total, share = (x[:, start : start + CHUNK].transpose(1, 2).unsqueeze(-1) for x in (log_decay, beta))
        total = total.cumsum(2)
        since = total - total.transpose(-1, -2)  # [num_seqs, heads, t, j]: the log decay between tokens j and t
        future = torch.ones(since.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        fading = since.masked_fill(future, float("-inf")).exp()
        system = share * (keys @ keys.transpose(-1, -2)) * fading  # its diagonal is taken to be 1
        known = share * (values - total.exp() * (keys @ memory))
        corrections = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        outs.append(total.exp() * (queries @ memory) + ((queries @ keys.transpose(-1, -2)) * fading) @ corrections)
        left = (total[:, :, -1:] - total).exp()  # how much of each correction is left after the chunk
        memory = total[:, :, -1:].exp() * memory + (left * keys).transpose(-1, -2) @ corrections
    return torch.cat(outs, 2).transpose(1, 2), memory


def causal_convolution(
    window: Float[Tensor, "num_seqs kernel_minus_1 channels"],
    x: Float[Tensor, "num_seqs num_tokens channels"],
    weight: Float[Tensor, "channels kernel"],
) -> tuple[Float[Tensor, "num_seqs num_tokens channels"], Float[Tensor, "num_seqs kernel_minus_1 channels"]]:
    """Sum each channel of the latest `kernel` tokens, weighted. window: the tokens before x, with zeros before the first token.

    Returns the sums, and the window after x.
    """
    inputs = torch.cat((window, x), 1)
    num_tokens, kernel = x.shape[1], weight.shape[1]
    out = inputs[:, :num_tokens] * weight[:, 0]
    for i in range(1, kernel):
        out = out + inputs[:, i : i + num_tokens] * weight[:, i]
    return out, inputs[:, num_tokens:]


def unit_length(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Compute x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class DeltaRecurrence(Untraced):
    """The part of Gated DeltaNet that depends on earlier tokens: from the projections of a token to its output.

    It has no weights of its own. Value head i has the key and the query of head i * num_key_heads // num_value_heads. It is
    untraced, because its computation depends on the sequences of the step.
    """

    def __init__(self, config: Any, layer: int) -> None:
        """config: a QwenNextConfig. layer: the index among the layers that have a state."""
        super().__init__()
        self.layer = layer
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.kernel_size = config.linear_conv_kernel_dim
        self.eps = config.rms_norm_eps

    def forward(
        self,
        attend: Recur,
        qkv: Float[Tensor, "num_tokens channels"],
        z: Float[Tensor, "num_tokens value_size"],
        b: Float[Tensor, "num_tokens value_heads"],
        a: Float[Tensor, "num_tokens value_heads"],
        weights: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Float[Tensor, "num_tokens value_size"]:
        """Advance the state of every sequence of the step by its tokens.

        Args:
            attend: the Attend of the step, whose `recur` advances the sequences' states.
            qkv: all queries, then all keys, then all values, before the convolution.
            z: the gates of the outputs, before a SiLU.
            b: beta before the sigmoid.
            a: gives log_decay = -exp(A_log) * softplus(a + dt_bias).
            weights: the convolution [channels, 1, kernel], A_log, dt_bias, and the norm over each head's output.
        """
        convolution, a_log, dt_bias, norm = (weight.float() for weight in weights)

        def advance(state: tuple[Tensor, ...], *rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            qkv, z, b, a = (x.float() for x in rows)  # [num_seqs, num_tokens, ...]
            window, memory = state
            mixed, window = causal_convolution(window, qkv, convolution.squeeze(1))
            q, k, v = F.silu(mixed).split([self.num_key_heads * self.key_dim] * 2 + [z.shape[-1]], dim=-1)
            group = self.num_value_heads // self.num_key_heads
            q, k = (unit_length(x.unflatten(-1, (-1, self.key_dim))).repeat_interleave(group, 2) for x in (q, k))
            v = v.unflatten(-1, (-1, self.value_dim))  # [num_seqs, num_tokens, value_heads, value_dim]
            log_decay = -a_log.exp() * F.softplus(a + dt_bias)
            rule = gated_delta_rule if q.shape[1] == 1 else gated_delta_rule_in_chunks
            out, memory = rule(memory, q * self.key_dim**-0.5, k, v, log_decay, b.sigmoid())
            out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps) * norm
            return out.flatten(2) * F.silu(z), (window, memory)

        return attend.recur(self.layer, advance, qkv, z, b, a).to(qkv.dtype)
