"""Rotary positions of a checkpoint: config.json -> the angle of every pair of numbers per position.

In: config.json. Out: a RopeConfig, and rope_frequencies, computed once when a model is built, by which layers.py rotates.
Powers and logarithms are decimal's, and cosines and sines are computed here, because those of torch and of C libraries have
other bits on other processors.

A model is trained up to some length. Longer texts must not need angles that it has never seen, so a scaling slows pairs down:

    linear   every pair, by `factor`. Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595
    yarn     the slow pairs, with a ramp over the index of the pair. Source: Peng et al. 2023, https://arxiv.org/abs/2309.00071
    llama3   the slow pairs, with a ramp over the number of turns. Source: https://arxiv.org/abs/2407.21783, section 3.4.2
    dynamic  no pair, up to max_position_embeddings, which no sequence exceeds here
"""

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.errors import CheckpointError, UnsupportedError, shown

PRECISE = Context(prec=40)  # digits
ROPE_TYPES = ("default", "dynamic", "linear", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles: the base frequency, and the scaling if the checkpoint has one."""

    theta: float = 10_000.0
    rope_type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0  # the most by which the scaling slows a pair down
    original_max_position_embeddings: int = 0  # the model's length in tokens before it was scaled (yarn, llama3)
    attention_factor: float = 1.0  # scales cos and sin, and therefore the scores by its square (yarn)
    beta_fast: float = 32.0  # a pair that makes more turns within the original context is unchanged (yarn)
    beta_slow: float = 1.0  # a pair that makes fewer turns is slowed by `factor` (yarn)
    truncate: bool = True  # whether the ends of yarn's ramp are rounded to whole pairs
    low_freq_factor: float = 1.0  # beta_slow of llama3
    high_freq_factor: float = 4.0  # beta_fast of llama3
    partial_rotary_factor: float = 1.0  # the part of each head that is rotated. The other attributes are about this part

    def __post_init__(self) -> None:
        """Refuse values with which rope_frequencies would overflow, divide by 0 or take log(0). NaN is in no range."""
        for name, low, high in (
            ("theta", 1.001 if self.rope_type == "yarn" else 1.0, 1e30),
            ("factor", 1.0, 1e6),  # the context is stretched, never shortened
            ("original_max_position_embeddings", 0, 2**31 - 1),
            ("attention_factor", 1e-6, 1e6),
            ("beta_slow", 1e-6, 1e6),
            ("beta_fast", self.beta_slow, 1e6),
            ("low_freq_factor", 1e-6, 1e6),
            ("high_freq_factor", 1.001 * self.low_freq_factor, 1e6),
        ):
            if not low <= getattr(self, name) <= high:
                value = shown(getattr(self, name))
                raise CheckpointError(f"rope_parameters: {name} must be in {low:g} .. {high:g}, got {value}; download it again")
        if not isinstance(self.truncate, bool):
            raise CheckpointError(f"rope_parameters: truncate must be true or false, got {shown(self.truncate)}")

    @property
    def max_position_embeddings(self) -> int:
        """The length to which YaRN stretches the original context. 0 for other types, whose config.json has the length."""
        return int(self.original_max_position_embeddings * self.factor) if self.rope_type == "yarn" else 0

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, allows_partial: bool = False) -> "RopeConfig":
        """Read config.json as older (rope_theta, rope_scaling) and newer (rope_parameters) transformers write it.

        allows_partial: whether the family supports a partial_rotary_factor.

        Raises: UnsupportedError (a type, or a contradiction), CheckpointError (a range), KeyError (a missing key).
        """
        rope = _parameters(config)
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {shown(rope_type)}; others are not supported"
            )
        if rope.get("type", rope_type) != rope_type or any(isinstance(value, dict) for value in rope.values()):
            raise UnsupportedError(f"rope_parameters must have one rope_type for all layers, got {shown(rope)}")
        share = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
        if share != 1.0 and not allows_partial:
            raise UnsupportedError("partial_rotary_factor must be 1.0: rotating a part of a head is not supported")
        theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
        fields: dict[str, Any] = {"theta": theta, "rope_type": rope_type, "partial_rotary_factor": share}
        if rope_type in ("default", "dynamic"):
            return cls(**fields)
        factor = rope["factor"]
        if rope_type == "linear":
            return cls(**fields, factor=float(factor))
        name = "original_max_position_embeddings"  # the file's own value precedes that of rope_parameters, as in transformers
        original = fields[name] = config.get(name) or rope.get(name) or config["max_position_embeddings"]
        if rope_type == "llama3":
            slowest, fastest = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return cls(**fields, factor=float(factor), low_freq_factor=slowest, high_freq_factor=fastest)
        factor = config["max_position_embeddings"] / original if factor is None else float(factor)
        return cls(
            **fields,
            factor=factor,
            attention_factor=_yarn_attention_factor(rope, factor),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=rope.get("truncate", True),
        )


def _parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return rope_parameters, or rope_scaling of older files. Raises: UnsupportedError if the file has both, unequal."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    if newer and older:
        both = [RopeConfig.from_hf(config | {name: None}, allows_partial=True) for name in ("rope_scaling", "rope_parameters")]
        if both[0] != both[1]:
            raise UnsupportedError(
                "rope_parameters and rope_scaling must be equal where config.json has both, got "
                f"{shown(newer)} and {shown(older)}; remove the wrong one"
            )
    return newer or older or {}


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    """Return the checkpoint's factor, a number or a ratio of two mscales, or else 0.1 ln(factor) + 1 (paper, section 3.4)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * _log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Float[Tensor, " half_head_dim"]:
    """Return the radians per position of each pair: theta ** (-2i / head_dim), some of them slowed down.

    The device is given because models are built on "meta", and only their weights are filled later.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    powers = [float(PRECISE.power(Decimal(rope.theta), Decimal(exponent))) for exponent in exponents.tolist()]
    plain = 1.0 / torch.tensor(powers, device="cpu")
    if rope.factor == 1.0:
        return plain
    if rope.rope_type == "linear":
        return plain / rope.factor
    slowed = _slowed_by_yarn(head_dim, rope) if rope.rope_type == "yarn" else _slowed_by_llama3(plain, rope)
    return plain * (1 - slowed) + plain / rope.factor * slowed


def _slowed_by_yarn(head_dim: int, rope: RopeConfig) -> Float[Tensor, " half_head_dim"]:
    """Return how much each pair is slowed, in 0 .. 1. The ramp is linear in the index of the pair."""

    def pair_that_turns(num_turns: float) -> float:
        """Return the index of the pair that makes num_turns turns within the original context."""
        turns_at_one = rope.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * _log(turns_at_one) / (2 * _log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    return ramp.clamp(0, 1)


def _slowed_by_llama3(plain: Float[Tensor, " half_head_dim"], rope: RopeConfig) -> Float[Tensor, " half_head_dim"]:
    """Return how much each pair is slowed, in 0 .. 1. The ramp is linear in the number of turns."""
    num_turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    return ((rope.high_freq_factor - num_turns) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _log(x: float) -> float:
    return float(PRECISE.ln(Decimal(x)))


def cos_and_sin(angles: Float[Tensor, "*angles"]) -> tuple[Float[Tensor, "*angles"], Float[Tensor, "*angles"]]:
    """Compute cos and sin in float64, by additions and products alone. angles: in radians, below 10^6."""
    x = angles.double()
    turns = (x * (2 / math.pi)).round()  # in quarters
    x = x - turns * 1.57079632673412561417 - turns * 6.07710050650619224932e-11  # pi / 2 in two parts, the first of 33 bits
    square, cos, sin = x * x, torch.zeros_like(x), torch.zeros_like(x)
    for i in range(7, -1, -1):  # Taylor series. |x| <= pi / 4, so the first term left out is below 10^-14
        cos = cos * square + (-1) ** i / math.factorial(2 * i)
        sin = sin * square + (-1) ** i / math.factorial(2 * i + 1)
    sin, quarter = sin * x, turns.long() & 3
    cos, sin = torch.where(quarter % 2 == 0, cos, sin), torch.where(quarter % 2 == 0, sin, cos)
    return torch.where((quarter + 1) & 2 == 0, cos, -cos), torch.where(quarter & 2 == 0, sin, -sin)
