"""Triton kernels for norms, gates and angles, each in place of up to ten of torch's. attention/triton.py rotates.

In: the inputs of such an operation. Out: its result. compile.py replaces modules by calls of these functions.

All of them are bound by memory. A kernel reads its rows once and writes the result once, while torch's kernels would store
every intermediate result. A program computes a row, or a part of a row, in fp32.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr):
    """Compute a row: x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    inside = columns < SIZE
    wide = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    dtype = out.dtype.element_ty
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (scale * normed).to(dtype), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Compute a part of a row: silu(gate) * up, where gate is the row's first half and up the second."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


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


def rms_norm(x: Float[Tensor, "*rows size"], weight: Float[Tensor, " size"], eps: float) -> Float[Tensor, "*rows size"]:
    """Compute layers.RMSNorm in one kernel."""
    size = x.shape[-1]
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    _rms_norm_kernel[(x.numel() // size,)](x, weight, out, eps, size, triton.next_power_of_2(size))
    return out


def silu_and_mul(gate_up: Float[Tensor, "*rows two_sizes"]) -> Float[Tensor, "*rows size"]:
    """Compute silu(gate) * up in one kernel, where gate is the first half of each row and up the second."""
    gate_up, size, tile = gate_up.contiguous(), gate_up.shape[-1] // 2, 1024
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(out.numel() // size, triton.cdiv(size, tile))](gate_up, out, size, tile)
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
