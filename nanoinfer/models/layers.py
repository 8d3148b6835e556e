"""What the model families share: embeddings, RMSNorm, rotary positions, the gated MLP, the weight matrices' common shapes.

Rows are packed tokens: every function here works on [num_tokens, ...] and on each token alone.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanoinfer.errors import CheckpointError, UnsupportedError


class Embedding(nn.Embedding):
    """One row of weights per id."""

    def reset_parameters(self) -> None:
        """Nothing: the checkpoint fills it. (On the meta device, the usual random init imports torch's compiler: a second.)"""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis; the mean in fp32.

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


class MergedLinear(nn.Linear):
    """Linear layers of the checkpoint that read the same rows, as one: fewer products, and larger ones.

    parts: their names and output sizes, in the order in which they stand in the rows that come out. weights.py stacks them.
    """

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts


class ActivatedLinear(nn.Linear):
    """activation(x @ weight.T + bias): one module, so that a packed form of it can do both at once (linear.py).

    activation: "silu", or "gelu_tanh", which GPT-2 calls gelu_new.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, activation: Literal["silu", "gelu_tanh"]) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.activation = activation

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return activate(super().forward(x), self.activation)


def activate(x: Float[Tensor, "*rows size"], activation: Literal["silu", "gelu_tanh"]) -> Float[Tensor, "*rows size"]:
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


class ResidualLinear(nn.Linear):
    """residual + x @ weight.T + bias: one module for ActivatedLinear's reason.

    Do not read the residual afterwards: a GPU adds to it where it lies (fused.py).
    """

    def forward(self, x: Float[Tensor, "*rows in"], residual: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows out"]:  # type: ignore[override]
        return residual + super().forward(x)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), and the residual, not to be read afterwards. Source: Shazeer 2020, https://arxiv.org/abs/2002.05202"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = ActivatedLinear(hidden_size, intermediate_size, bias=False, activation="silu")
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = ResidualLinear(intermediate_size, hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "num_tokens hidden"], residual: Float[Tensor, "num_tokens hidden"]
    ) -> Float[Tensor, "num_tokens hidden"]:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x), residual)  # gate_proj holds the silu


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles: base frequency, and YaRN's stretch of it where the checkpoint asks for one.

    factor 1 is plain RoPE. attention_factor scales cos and sin, and so the scores by its square.
    """

    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def max_position_embeddings(self) -> int:
        """How far YaRN stretches the original context; 0 for plain RoPE."""
        return int(self.original_max_position_embeddings * self.factor)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "RopeConfig":
        """From config.json as older (rope_theta, rope_scaling) and newer (rope_parameters) transformers write it.

        Raises: UnsupportedError for a rope type other than default and yarn, CheckpointError for a value out of its range.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "yarn"):
            raise UnsupportedError(f"rope_type must be default or yarn, got {rope_type!r}; others are not supported")
        if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedError("partial_rotary_factor must be 1.0: rotating a part of a head is not supported")
        if theta <= 0:
            raise CheckpointError(f"rope_theta must be > 0, got {theta}; download config.json again")
        if rope_type == "default":
            return cls(theta=theta)
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
        if factor < 1:
            raise CheckpointError(f"YaRN's factor must be >= 1, got {factor}; it stretches the context")
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
    """0.1 ln(factor) + 1 (section 3.4 of the paper), unless the checkpoint gives it, whole or as a ratio of two mscales."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


class RotaryEmbedding(nn.Module):
    """Rotates each pair (x_i, x_{i + head_dim/2}) of q and k by position * inv_freq_i, so that q . k depends on distance.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; YaRN: Peng et al. 2023, https://arxiv.org/abs/2309.00071
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, rope: RopeConfig) -> None:
        super().__init__()
        # Computed, not loaded, and always in fp32: a bf16 angle is wrong by whole turns at position 10,000. The device is
        # named because models are built on "meta" and only their weights are filled later.
        self.register_buffer("inv_freq", rope_frequencies(head_dim, rope), persistent=False)
        self.attention_factor = rope.attention_factor

    def forward(
        self, positions: Int[Tensor, " num_tokens"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "num_tokens 1 head_dim"], Float[Tensor, "num_tokens 1 head_dim"]]:
        """cos and sin for every token, computed once per step and shared by all layers and heads."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq  # [num_tokens, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [num_tokens, 1, head_dim]
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def apply_rotary(
    x: Float[Tensor, "num_tokens heads head_dim"],
    cos: Float[Tensor, "num_tokens 1 head_dim"],
    sin: Float[Tensor, "num_tokens 1 head_dim"],
) -> Float[Tensor, "num_tokens heads head_dim"]:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Rotation(nn.Module):
    """apply_rotary, as a module that can be replaced by a fused one (fused.py)."""

    def forward(
        self,
        x: Float[Tensor, "num_tokens heads head_dim"],
        cos: Float[Tensor, "num_tokens 1 head_dim"],
        sin: Float[Tensor, "num_tokens 1 head_dim"],
    ) -> Float[Tensor, "num_tokens heads head_dim"]:
        return apply_rotary(x, cos, sin)


class NormedRotation(RMSNorm):
    """An RMSNorm over each head, then the rotation: one module for Rotation's reason."""

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "num_tokens heads head_dim"],
        cos: Float[Tensor, "num_tokens 1 head_dim"],
        sin: Float[Tensor, "num_tokens 1 head_dim"],
    ) -> Float[Tensor, "num_tokens heads head_dim"]:
        return apply_rotary(super().forward(x), cos, sin)


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Float[Tensor, " half_head_dim"]:
    """Radians per position of each pair: theta ** (-2i / head_dim), and YaRN's blend where rope.factor is not 1.

    YaRN leaves the fast pairs (more than beta_fast turns within the original context) as they are, slows the slow ones (fewer
    than beta_slow turns) by `factor`, and blends linearly between the two.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.factor == 1.0:
        return plain

    def pair_that_turns(num_turns: float) -> float:
        """The index of the pair that makes so many turns within the original context."""
        turns_at_one = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns_at_one) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)  # 0: as it is, 1: slowed by factor
    return plain * (1 - slowed) + plain / rope.factor * slowed
