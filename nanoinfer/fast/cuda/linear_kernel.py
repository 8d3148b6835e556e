"""A Triton kernel for the linear layers of a step with few rows, such as a decode step: what bounds it is reading the weight.

In: up to MAX_ROWS rows. Out: a linear layer's rows, with the residual added, or silu(gate) * up of a layer that holds both. A
program computes a few columns for all rows, so each weight is read once. With torch, the sum with the residual and the gate are
further launches or slower ones: its product with a residual took 14 us on an H200 where this kernel takes 6.
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.triton import uses_tensor_cores

MAX_ROWS = 16  # a product of tensor cores has at least 16 rows
# Output columns of a program, inputs at a time, warps and stages: the fastest of ten choices for Qwen3-0.6B on an H200.
COLUMNS, TILE, NUM_WARPS, NUM_STAGES = 16, 256, 1, 4


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, bias, residual, out, x_stride, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of all rows. GATED: the weight has the rows of the gate, and after them those of up."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < NUM_OUT
    starts = weight + columns[:, None].to(tl.int64) * NUM_IN
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, NUM_IN, TILE):
        inputs = first + tl.arange(0, TILE)
        within = inputs < NUM_IN
        tile = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=there[:, None] & within[None, :], other=0.0)
        mask = inside[:, None] & within[None, :]
        total = tl.dot(tile, tl.trans(tl.load(starts + inputs[None, :], mask=mask, other=0.0)), total)
        if GATED:
            w = tl.load(starts + NUM_OUT * NUM_IN + inputs[None, :], mask=mask, other=0.0)
            up = tl.dot(tile, tl.trans(w), up)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + NUM_OUT + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * up
    where = rows[:, None] * NUM_OUT + columns[None, :]
    mask = there[:, None] & inside[None, :]
    if residual is not None:
        total += tl.load(residual + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=mask)


def supports(x: Tensor, linear: nn.Linear) -> bool:
    """Whether the kernel computes a layer for these rows on this GPU: few, and of 16 bits, with contiguous weights.

    Tensor cores do not multiply fp32 exactly.
    """
    is_contiguous = linear.weight.is_contiguous() and (linear.bias is None or linear.bias.is_contiguous())
    has_rows = x.ndim == 2 and len(x) <= MAX_ROWS and x.stride(1) == 1
    return has_rows and is_contiguous and x.element_size() == 2 and uses_tensor_cores()


def few_rows_linear(
    x: Float[Tensor, "num_tokens in"],
    weight: Float[Tensor, "rows in"],
    bias: Float[Tensor, " rows"] | None,
    *,
    residual: Float[Tensor, "num_tokens out"] | None = None,
    gated: bool = False,
    in_place: bool = False,
) -> Float[Tensor, "num_tokens out"]:
    """Compute a linear layer for x that `supports` accepts. All tensors but x are contiguous.

    Args:
        weight: its rows are the outputs. If gated, those of the gate and then as many of up.
        residual: added to the outputs.
        gated: silu(gate) * up is returned.
        in_place: the result is written over the residual.
    """
    num_out = len(weight) // (1 + gated)
    out = x.new_empty(len(x), num_out) if residual is None or not in_place else residual
    _linear_kernel[(triton.cdiv(num_out, COLUMNS),)](
        x, weight, bias, residual, out, x.stride(0), len(x), weight.shape[1], num_out, gated, MAX_ROWS, COLUMNS, TILE,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
