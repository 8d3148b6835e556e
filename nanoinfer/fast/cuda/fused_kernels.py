"""Triton kernels for norms, gates and angles, each in place of up to ten of torch's. attention/triton.py rotates.

In: the inputs of such an operation. Out: its result. compile.py replaces modules by calls of these functions.

All of them are bound by memory. A kernel reads its rows once and writes the result once, while torch's kernels would store
every intermediate result. A program computes a row, or a part of a row, in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.triton import _load_scale


class Norm(NamedTuple):
    """An RMSNorm over the last axis."""

    weight: Float[Tensor, " size"]
    eps: float
    zero_centred: bool = False  # whether it multiplies by 1 + weight


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """Compute silu or gelu_tanh of gates in fp32. (1 + tanh(z)) / 2 is sigmoid(2 z)."""
    slope = gate
    if ACTIVATION == "gelu_tanh":
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate * tl.sigmoid(slope)


@triton.jit
def _rms_norm_kernel(
    x, weight, residual, out, eps, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, ZERO_CENTRED: tl.constexpr
):  # fmt: skip
    """Compute a row: x / sqrt(mean(x^2) + eps) * weight, plus the residual."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    inside = columns < SIZE
    wide = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    dtype = out.dtype.element_ty
    normed = _load_scale(weight, columns, inside, ZERO_CENTRED) * normed
    if residual is not None:
        normed += tl.load(residual + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, normed.to(dtype), mask=inside)


@triton.jit
def _gate_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute a part of a row: activation(gate) * up, where gate is the row's first half and up the second."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (_activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _angles_kernel(positions, inv_freq, cos, sin, factor, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Compute the cos and the sin of a token's angles, each twice, for both halves of a head."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, HALF_PADDED)
    inside = pairs < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + pairs, mask=inside, other=0.0)
    c = (tl.cos(angle) * factor).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * factor).to(sin.dtype.element_ty)
    for half in tl.static_range(2):
        where = (token * 2 + half) * HALF + pairs
        tl.store(cos + where, c, mask=inside)
        tl.store(sin + where, s, mask=inside)


def rms_norm(
    x: Float[Tensor, "*rows size"], norm: Norm, residual: Float[Tensor, "*rows size"] | None = None
) -> Float[Tensor, "*rows size"]:
    """Compute layers.RMSNorm or ZeroCentredRMSNorm in one kernel, with the sum with a residual of the same dtype and shape."""
    size = x.shape[-1]
    x, weight = x.contiguous(), norm.weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    _rms_norm_kernel[(x.numel() // size,)](
        x, weight, residual, out, norm.eps, size, triton.next_power_of_2(size), norm.zero_centred
    )  # fmt: skip
    return out


def gate_and_mul(gate_up: Float[Tensor, "*rows two_sizes"], activation: str = "silu") -> Float[Tensor, "*rows size"]:
    """Compute activation(gate) * up in one kernel, where gate is the first half of each row and up the second.

    activation: "silu" or "gelu_tanh".
    """
    gate_up, size, tile = gate_up.contiguous(), gate_up.shape[-1] // 2, 1024
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    _gate_kernel[(out.numel() // size, triton.cdiv(size, tile))](gate_up, out, size, tile, activation)
    return out


def angles(
    positions: Int[Tensor, " num_tokens"], inv_freq: Float[Tensor, " half_head_dim"], factor: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "num_tokens 1 head_dim"], Float[Tensor, "num_tokens 1 head_dim"]]:
    """Compute layers.RotaryEmbedding in one kernel: cos and sin of position * inv_freq, times the factor."""
    half, positions = len(inv_freq), positions.contiguous()
    cos, sin = (torch.empty(len(positions), 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    _angles_kernel[(len(positions),)](
        positions, inv_freq, cos, sin, factor, half, triton.next_power_of_2(half), num_warps=1
    )  # fmt: skip
    return cos, sin
