"""Layers that the model families share: embeddings, RMSNorm, rotary positions, the gated MLP.

Rows are packed tokens. Every function works on [num_tokens, ...] and computes each token on its own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from nanoinfer.models.rope import RopeConfig, cos_and_sin, rope_frequencies

Ids = Int[Tensor, " num_tokens"]  # also the shape of positions
Hidden = Float[Tensor, "num_tokens hidden"]  # a row for each token
Angles = Float[Tensor, "num_tokens 1 num_rotated"]  # the cos or the sin of each token's position, for all heads
Heads = Float[Tensor, "num_tokens heads head_dim"]

TABLE_STEP = 1024  # further positions whose cos and sin are computed with the first that is needed


class Untraced(nn.Module):
    """A module that a trace records as a single call (fast/trace.py), because symbols cannot enter it."""


class Embedding(nn.Embedding):
    """A table with a row of weights per id."""

    def reset_parameters(self) -> None:
        """Do nothing: the checkpoint fills the table. A random init on the meta device would import torch's compiler (1 s)."""


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last axis. The mean is computed in fp32.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467
    """

    __call__: Callable[..., Tensor]  # nn.Module declares no result

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class ZeroCentredRMSNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + weight, computed in fp32 and rounded once."""

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


@wrap_torch_function(lambda x: (x,))  # a tracer records a single operation, as for torch's own functions
def sigmoid(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Compute 1 / (1 + exp(-x)). torch.sigmoid rounds a tensor's tail differently, so a row would depend on the batch."""
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)


def gelu_tanh(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Compute x * Phi(x) with tanh in place of the error function. GPT-2 calls it gelu_new.

    Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
    """
    return F.gelu(x, approximate="tanh")


class SwiGLU(nn.Module):
    """Computes down(silu(gate(x)) * up(x)). Source: Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Hidden) -> Hidden:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RotaryEmbedding(nn.Module):
    """Rotates each pair (x_i, x_{i + head_dim/2}) of q and k by position * inv_freq_i, so that q . k depends on distance.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, rope: RopeConfig) -> None:
        super().__init__()
        # Computed, not loaded, and always in fp32: an angle in bf16 is wrong by whole turns at position 10,000.
        self.register_buffer("inv_freq", rope_frequencies(head_dim, rope), persistent=False)
        self.attention_factor = rope.attention_factor
        self._table = torch.empty(2, 0, head_dim // 2, device="cpu")  # cos and sin of the first positions, in fp32

    def forward(self, positions: Ids, dtype: torch.dtype) -> tuple[Angles, Angles]:
        """Return cos and sin for every token, once per step. All layers and heads share them."""
        if positions.device.type == "cpu":
            both = self._table_of(int(positions.max()) + 1 if len(positions) else 0)[:, positions]
        else:
            angles = self._angles(positions)
            both = torch.stack((angles.cos(), angles.sin()))
        both = torch.cat((both, both), dim=-1).unsqueeze(2) * self.attention_factor  # [2, num_tokens, 1, head_dim]
        cos, sin = both.to(dtype)
        return cos, sin

    def _table_of(self, num_positions: int) -> Float[Tensor, "2 positions half_head_dim"]:
        table = self._table  # of this thread, in case that another extends it
        if num_positions > table.shape[1]:
            angles = self._angles(torch.arange(table.shape[1], num_positions + TABLE_STEP, device="cpu"))
            self._table = table = torch.cat((table, torch.stack(cos_and_sin(angles)).float()), dim=1)
        return table

    def _angles(self, positions: Ids) -> Float[Tensor, "num_tokens half_head_dim"]:
        return positions.float().unsqueeze(-1) * self.inv_freq


@wrap_torch_function(lambda x, cos, sin: (x,))
def apply_rotary(x: Heads, cos: Angles, sin: Angles) -> Heads:
    """Rotate every head of every token by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@wrap_torch_function(lambda x, cos, sin, num_rotated: (x,))
def partial_rotary(x: Heads, cos: Angles, sin: Angles, num_rotated: int) -> Heads:
    """Rotate the first num_rotated numbers of every head, and keep the others."""
    return torch.cat((apply_rotary(x[..., :num_rotated], cos, sin), x[..., num_rotated:]), dim=-1)
