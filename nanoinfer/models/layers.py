"""Layers that the model families share: embeddings, RMSNorm, rotary positions, the gated MLP.

Rows are packed tokens. Every function works on [num_tokens, ...] and computes each token on its own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanoinfer.errors import CheckpointError, UnsupportedError, shown


class Embedding(nn.Embedding):
    """One row of weights per id."""

    def reset_parameters(self) -> None:
        """Do nothing: the checkpoint fills the table. On the meta device a random init imports torch's compiler (1 s)."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis. The mean is computed in fp32.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def gelu_tanh(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """x * Phi(x) with tanh in place of the error function. GPT-2 calls it gelu_new.

    Source: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
    """
    return F.gelu(x, approximate="tanh")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "num_tokens hidden"]) -> Float[Tensor, "num_tokens hidden"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def merge_linears(*linears: nn.Linear) -> nn.Linear:
    """Join layers with the same input into one, whose output is theirs side by side: one large product, not several small."""
    merged = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False, device="meta")
    merged.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        merged.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return merged


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles: the base frequency, and YaRN's stretch of it where the checkpoint has one.

    Attributes:
        factor: YaRN's stretch of the context. 1 is plain RoPE.
        attention_factor: scales cos and sin, and therefore the scores by its square.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        """Refuse what would overflow, or take the logarithm of 0, in rope_frequencies. NaN is in no range."""
        is_yarn = self.original_max_position_embeddings > 0
        for name, low, high in (
            ("theta", 1.001 if is_yarn else 1.0, 1e30),
            ("factor", 1.0, 1e6),  # it stretches the context
            ("original_max_position_embeddings", 0, 2**31 - 1),
            ("attention_factor", 1e-6, 1e6),
            ("beta_fast", 1e-6, 1e6),
            ("beta_slow", 1e-6, 1e6),
        ):
            if not low <= getattr(self, name) <= high:
                value = shown(getattr(self, name))
                raise CheckpointError(f"rope_parameters: {name} must be in {low:g} .. {high:g}, got {value}; download it again")
        if not isinstance(self.truncate, bool):
            raise CheckpointError(f"rope_parameters: truncate must be true or false, got {shown(self.truncate)}")

    @property
    def max_position_embeddings(self) -> int:
        """How far YaRN stretches the original context; 0 for plain RoPE."""
        return int(self.original_max_position_embeddings * self.factor)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "RopeConfig":
        """Read config.json as older (rope_theta, rope_scaling) and newer (rope_parameters) transformers write it.

        Raises:
            UnsupportedError: a rope type other than default and yarn.
            CheckpointError: a value out of its range.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "yarn"):
            raise UnsupportedError(f"rope_type must be default or yarn, got {shown(rope_type)}; others are not supported")
        if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedError("partial_rotary_factor must be 1.0: rotating a part of a head is not supported")
        if rope_type == "default":
            return cls(theta=theta)
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
        return cls(
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=_yarn_attention_factor(rope, factor),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=rope.get("truncate", True),
        )


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    """0.1 ln(factor) + 1 (section 3.4 of the paper), unless the checkpoint has it, as a number or as a ratio of two mscales."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


class RotaryEmbedding(nn.Module):
    """Rotates each pair (x_i, x_{i + head_dim/2}) of q and k by position * inv_freq_i, so that q . k depends on distance.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864. YaRN: Peng et al. 2023, https://arxiv.org/abs/2309.00071
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, rope: RopeConfig) -> None:
        super().__init__()
        # Computed, not loaded, and always in fp32: a bf16 angle is wrong by whole turns at position 10,000.
        self.register_buffer("inv_freq", rope_frequencies(head_dim, rope), persistent=False)
        self.attention_factor = rope.attention_factor

    def forward(
        self, positions: Int[Tensor, " num_tokens"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "num_tokens 1 head_dim"], Float[Tensor, "num_tokens 1 head_dim"]]:
        """Compute cos and sin for every token, once per step. All layers and heads share them."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq  # [num_tokens, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [num_tokens, 1, head_dim]
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def apply_rotary(
    x: Float[Tensor, "num_tokens heads head_dim"],
    cos: Float[Tensor, "num_tokens 1 head_dim"],
    sin: Float[Tensor, "num_tokens 1 head_dim"],
) -> Float[Tensor, "num_tokens heads head_dim"]:
    """Rotate every head of every token by its position's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Float[Tensor, " half_head_dim"]:
    """Radians per position of each pair: theta ** (-2i / head_dim), and YaRN's blend where rope.factor is not 1.

    YaRN leaves the fast pairs (more than beta_fast turns within the original context) unchanged, slows the slow pairs (fewer
    than beta_slow turns) by `factor`, and blends linearly between the two. The device is named because models are built on
    "meta", and only their weights are filled later.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.factor == 1.0:
        return plain

    def pair_that_turns(num_turns: float) -> float:
        """The index of the pair that makes num_turns turns within the original context."""
        turns_at_one = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns_at_one) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)  # 0: unchanged, 1: slowed by factor
    return plain * (1 - slowed) + plain / rope.factor * slowed
