"""What lies between the products of a model, in one Triton kernel each instead of up to ten of torch's: norms, rotation, gate.
The residual is added by the product before it.

In: a finished model on a GPU. Out: the same model, some modules replaced. Nothing else knows of it (linear.py is the CPU's).

Each of these is bound by memory: a kernel reads its rows once and writes the result once, where torch's would store every
step on the way. A program has one row, or a part of one, and computes in fp32.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.models.layers import NormedRotation, ResidualLinear, RMSNorm, Rotation, SwiGLU


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr):
    """One row: x / sqrt(mean(x^2) + eps) * weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    inside = columns < SIZE
    wide = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    dtype = out.dtype.element_ty
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (scale * normed).to(dtype), mask=inside)


@triton.jit
def _rotate_kernel(
    x, weight, cos, sin, out, x_stride, eps, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One head of one token: its two halves, normed together if there is a weight, turned by the token's angles.

    first, second = first * cos - second * sin, second * cos + first * sin
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, HALF_PADDED)
    inside = pairs < HALF
    start = x + token * x_stride + head * 2 * HALF
    first = tl.load(start + pairs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if HAS_NORM:
        shrink = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        first = tl.load(weight + pairs, mask=inside, other=0.0).to(tl.float32) * first * shrink
        second = tl.load(weight + HALF + pairs, mask=inside, other=0.0).to(tl.float32) * second * shrink
    c = tl.load(cos + token * 2 * HALF + pairs, mask=inside, other=0.0).to(tl.float32)  # both halves have the same angles
    s = tl.load(sin + token * 2 * HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    end = out + (token * NUM_HEADS + head) * 2 * HALF
    tl.store(end + pairs, (first * c - second * s).to(dtype), mask=inside)
    tl.store(end + HALF + pairs, (second * c + first * s).to(dtype), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """A part of one row: silu(gate) * up, where gate is the row's first half and up the second."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


class FusedRMSNorm(nn.Module):
    """RMSNorm in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Float[Tensor, "num_tokens size"]) -> Float[Tensor, "num_tokens size"]:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        _rms_norm_kernel[(len(x),)](x, self.weight, out, self.eps, size, triton.next_power_of_2(size))
        return out


class FusedRotation(nn.Module):
    """Rotation or NormedRotation in one kernel."""

    def __init__(self, rotation: Rotation | NormedRotation) -> None:
        super().__init__()
        self.weight: Tensor | None = None
        self.eps = 0.0
        if isinstance(rotation, NormedRotation):
            self.weight, self.eps = rotation.weight, rotation.eps

    def forward(
        self,
        x: Float[Tensor, "num_tokens heads head_dim"],
        cos: Float[Tensor, "num_tokens 1 head_dim"],
        sin: Float[Tensor, "num_tokens 1 head_dim"],
    ) -> Float[Tensor, "num_tokens heads head_dim"]:
        num_tokens, num_heads, head_dim = x.shape
        if x.stride()[1:] != (head_dim, 1):
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        half = head_dim // 2
        _rotate_kernel[(num_tokens, num_heads)](
            x, x if self.weight is None else self.weight, cos, sin, out, x.stride(0), self.eps,
            num_heads, half, triton.next_power_of_2(half), self.weight is not None,
        )  # fmt: skip
        return out


class FusedSwiGLU(nn.Module):
    """SwiGLU with gate and up as one product, and silu(gate) * up in one kernel."""

    def __init__(self, mlp: SwiGLU) -> None:
        super().__init__()
        self.gate_up_weight = nn.Parameter(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), requires_grad=False)
        self.down_proj = FusedResidualLinear(mlp.down_proj)

    def forward(
        self, x: Float[Tensor, "num_tokens hidden"], residual: Float[Tensor, "num_tokens hidden"]
    ) -> Float[Tensor, "num_tokens hidden"]:
        gate_up = nn.functional.linear(x, self.gate_up_weight)  # [num_tokens, 2 * intermediate]
        size, tile = gate_up.shape[1] // 2, 1024
        out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
        _silu_mul_kernel[(len(x), triton.cdiv(size, tile))](gate_up, out, size, tile)
        return self.down_proj(out, residual)


class FusedResidualLinear(nn.Module):
    """ResidualLinear without bias: the product is added to the residual where it lies, by the product's own kernel.

    So no kernel goes over the residual for the sum alone, and the norm that follows reads it once. The residual that was handed
    in is gone afterwards.
    """

    def __init__(self, linear: ResidualLinear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(
        self, x: Float[Tensor, "num_tokens in"], residual: Float[Tensor, "num_tokens out"]
    ) -> Float[Tensor, "num_tokens out"]:
        return residual.addmm_(x, self.weight.t())


_FUSED = {
    RMSNorm: FusedRMSNorm,
    Rotation: FusedRotation,
    NormedRotation: FusedRotation,
    SwiGLU: FusedSwiGLU,
    ResidualLinear: FusedResidualLinear,
}


def fuse(model: nn.Module) -> None:
    """Replace a model's modules that have a fused form. Only those themselves: a subclass may do more. One at a time."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _FUSED and getattr(child, "bias", None) is None:  # a sum of three is left to torch
                setattr(parent, name, _FUSED[type(child)](child))
