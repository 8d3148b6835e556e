"""A Triton kernel for linear layers in 8 or 4 bits, in decode steps of up to decode_kernels.MAX_ROWS rows.

In: the rows of a step, and Integers. Out: what decode_linear gives for the widened weight, with a norm before the product and a
gate or a residual after it. Its rule for programmatic dependent launch is that of decode_kernels.py.

With few rows a step takes the time of reading weights, so half or a quarter of the bytes take that much less, as long as a
weight costs few instructions. So integers are multiplied as they are, and a group's sum gets its scale and its zero:

    sum over groups of scale * (sum of integer * x - zero * sum of x)

The weight is not rounded to the dtype of x, which it is where it is widened (linear_kernel.py, and quantized.py for many rows).
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.triton import _load_scale
from nanoinfer.fast.cuda.decode_kernels import MAX_ROWS, _launch, _sum_of_squares, columns_and_tile
from nanoinfer.fast.cuda.fused_kernels import Norm
from nanoinfer.fast.cuda.integers import Integers, _integers_of, _load_groups
from nanoinfer.fast.cuda.linear_kernel import _store_outputs

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

_TILE_BYTES = 2**13  # integers that a program loads before it waits, 64 bytes a thread


@triton.jit
def _load_inputs(
    x, norm, factor, groups, PART: tl.constexpr, NUM_IN: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Return the inputs of a part of each group of a row, [groups, BYTES]. norm: the weight of the row's norm, if any."""
    inputs = groups[:, None] * GROUP + PART * BYTES + tl.arange(0, BYTES)[None, :]
    a = tl.load(x + inputs, mask=inputs < NUM_IN, other=0.0).to(tl.float32)
    if norm is not None:
        scale = _load_scale(norm, inputs, inputs < NUM_IN, ZERO_CENTRED)
        a = (scale * (a * factor)).to(x.dtype.element_ty).to(tl.float32)
    return a


@triton.jit
def _group_sums(packed, zero, a, PART: tl.constexpr, BITS: tl.constexpr):
    """Return the sum of (integer - zero) * input for a part of each group, [columns, groups]."""
    return tl.sum(_integers_of(packed, PART, BITS) * a[None, :, :], 2) - zero * tl.sum(a, 1)[None, :]


@triton.jit
def _integer_linear_kernel(
    x, norm, weight, scales, zeros, bias, residual, out, eps, x_stride, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of all rows. GATED: the weight has the rows of the gate, and after them those of up."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    NUM_WEIGHTS: tl.constexpr = NUM_OUT * (1 + GATED)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    groups = tl.arange(0, TILE // GROUP)
    packed, scale, zero = _load_groups(weight, scales, zeros, columns, groups, NUM_IN, NUM_WEIGHTS, GROUP, BITS)
    if GATED:
        up_packed, up_scale, up_zero = _load_groups(
            weight, scales, zeros, columns + NUM_OUT, groups, NUM_IN, NUM_WEIGHTS, GROUP, BITS
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, NUM_IN, TILE):
        groups = first // GROUP + tl.arange(0, TILE // GROUP)
        if first > 0:
            packed, scale, zero = _load_groups(weight, scales, zeros, columns, groups, NUM_IN, NUM_WEIGHTS, GROUP, BITS)
            if GATED:
                up_packed, up_scale, up_zero = _load_groups(
                    weight, scales, zeros, columns + NUM_OUT, groups, NUM_IN, NUM_WEIGHTS, GROUP, BITS
                )  # fmt: skip
        for row in range(num_rows):
            factor = 0.0
            if norm is not None:
                factor = tl.rsqrt(_sum_of_squares(x + row * x_stride, NUM_IN, TILE) / NUM_IN + eps)
            sums = tl.zeros([COLUMNS, TILE // GROUP], tl.float32)
            up_sums = tl.zeros([COLUMNS, TILE // GROUP], tl.float32)
            for part in tl.static_range(8 // BITS):
                a = _load_inputs(x + row * x_stride, norm, factor, groups, part, NUM_IN, GROUP, BYTES, ZERO_CENTRED)
                sums += _group_sums(packed, zero, a, part, BITS)
                if GATED:
                    up_sums += _group_sums(up_packed, up_zero, a, part, BITS)
            is_row = (rows == row)[:, None]
            # + 0.0 rounds a product before threads exchange it. Fused with a sum, it would differ between two threads.
            total += tl.where(is_row, tl.sum(scale * sums + 0.0, 1)[None, :], 0.0)
            if GATED:
                up += tl.where(is_row, tl.sum(up_scale * up_sums + 0.0, 1)[None, :], 0.0)
    _store_outputs(total, up, bias, residual, out, rows, columns, num_rows, NUM_OUT, GATED, ACTIVATION)


def integer_linear(
    x: Float[Tensor, "num_tokens in"],
    weight: Integers,
    bias: Float[Tensor, " rows"] | None,
    *,
    norm: Norm | None = None,
    residual: Float[Tensor, "num_tokens out"] | None = None,
    gated: bool = False,
    activation: str = "silu",
    in_place: bool = False,
) -> Float[Tensor, "num_tokens out"]:
    """Compute a linear layer for at most MAX_ROWS rows. The arguments are those of decode_linear, contiguous but for x."""
    num_out, num_in, bits = len(weight.packed) // (1 + gated), weight.num_in, weight.bits
    columns, tile = columns_and_tile(num_out, num_in, bits * (1 + gated), _TILE_BYTES)
    out = x.new_empty(len(x), num_out) if residual is None or not in_place else residual
    scale, eps, zero_centred = norm or (None, 0.0, False)
    _launch(
        _integer_linear_kernel, (triton.cdiv(num_out, columns),),
        x, scale, *weight[:3], bias, residual, out, eps, x.stride(0), len(x), num_in, num_out, weight.group_size, bits, gated,
        activation, zero_centred, MAX_ROWS, columns, tile,
    )  # fmt: skip
    return out
