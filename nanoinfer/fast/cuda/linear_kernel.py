"""A Triton kernel for the linear layers of a step with few rows, such as a decode step: what bounds it is reading the weight.

In: up to MAX_ROWS rows. Out: a linear layer's rows, with the residual added, or silu(gate) * up of a layer that holds both. A
program computes a few columns for all rows, so each weight is read once. A layer with few columns has too few programs for a
GPU, so several share its columns: each multiplies a part of the inputs (split K), and the last adds their sums, in order.
With torch, the sum with the residual and the gate are further launches or slower ones: its product with a residual took 14 us
on an H200 where this kernel takes 6.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanoinfer.attention.triton import uses_tensor_cores
from nanoinfer.fast.cuda.fused_kernels import _activated

MAX_ROWS = 16  # a product of tensor cores has at least 16 rows
# Output columns of a program, inputs at a time, warps and stages: the fastest of ten choices for Qwen3-0.6B on an H200.
COLUMNS, TILE, NUM_WARPS, NUM_STAGES = 16, 256, 1, 4
MIN_PROGRAMS = 256  # with fewer programs, a layer with a residual is split, into parts of at least two tiles of inputs


class Arrivals:
    """Counters of the programs that have finished their part, for one layer. A kernel takes them at 0 and leaves them at 0."""

    def __init__(self) -> None:
        self._counters: Tensor | None = None

    def counters(self, num: int, device: torch.device) -> Int[Tensor, " num"]:
        """Return the counters. num: the same in each call, because graphs keep their address."""
        if self._counters is None or self._counters.device != device:
            self._counters = torch.zeros(num, dtype=torch.int32, device=device)
        return self._counters


@triton.jit
def _store_outputs(
    total, up, bias, residual, out, rows, columns, num_rows, NUM_OUT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr = "silu",
):  # fmt: skip
    """Add the bias to products [rows, columns], gate them by up, add the residual, and store what is inside."""
    inside = columns < NUM_OUT
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + NUM_OUT + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = _activated(total, ACTIVATION) * up
    where = rows[:, None] * NUM_OUT + columns[None, :]
    mask = (rows < num_rows)[:, None] & inside[None, :]
    if residual is not None:
        total += tl.load(residual + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, bias, residual, out, partial, num_arrived, x_stride, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of all rows, from a part of the inputs. The last program of the columns adds the parts.

    GATED: the weight has the rows of the gate, and after them those of up. partial: [splits, ROWS, columns].
    """
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < NUM_OUT
    starts = weight + columns[:, None].to(tl.int64) * NUM_IN
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    PART: tl.constexpr = tl.cdiv(tl.cdiv(NUM_IN, NUM_SPLITS), TILE) * TILE
    begin = tl.program_id(1) * PART
    for first in range(0, PART, TILE):
        inputs = begin + first + tl.arange(0, TILE)
        within = inputs < NUM_IN
        tile = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=there[:, None] & within[None, :], other=0.0)
        mask = inside[:, None] & within[None, :]
        total = tl.dot(tile, tl.trans(tl.load(starts + inputs[None, :], mask=mask, other=0.0)), total)
        if GATED:
            w = tl.load(starts + NUM_OUT * NUM_IN + inputs[None, :], mask=mask, other=0.0)
            up = tl.dot(tile, tl.trans(w), up)
    if NUM_SPLITS > 1:
        at = (rows[:, None] * tl.num_programs(0) * COLUMNS) + columns[None, :]
        size = ROWS * tl.num_programs(0) * COLUMNS
        tl.store(partial + tl.program_id(1) * size + at, total)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(num_arrived + tl.program_id(0), 1, sem="acq_rel") != NUM_SPLITS - 1:
            return
        tl.store(num_arrived + tl.program_id(0), 0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in range(NUM_SPLITS):
            total += tl.load(partial + split * size + at)
    _store_outputs(total, up, bias, residual, out, rows, columns, num_rows, NUM_OUT, GATED, ACTIVATION)


def supports(x: Tensor, linear: nn.Linear) -> bool:
    """Whether the kernel computes a layer for these rows on this GPU: few, and of 16 bits, with contiguous weights.

    Tensor cores do not multiply fp32 exactly.
    """
    is_contiguous = linear.weight.is_contiguous() and (linear.bias is None or linear.bias.is_contiguous())
    has_rows = x.ndim == 2 and len(x) <= MAX_ROWS and x.stride(1) == 1
    return has_rows and is_contiguous and x.element_size() == 2 and uses_tensor_cores()


def num_splits_of(num_out: int, num_in: int) -> int:
    """Return into how many parts the inputs of a layer with a residual are split, whatever the number of its rows."""
    num_splits = 1
    while triton.cdiv(num_out, COLUMNS) * num_splits < MIN_PROGRAMS and num_in >= 4 * num_splits * TILE:
        num_splits *= 2
    return num_splits


def few_rows_linear(
    x: Float[Tensor, "num_tokens in"],
    weight: Float[Tensor, "rows in"],
    bias: Float[Tensor, " rows"] | None,
    *,
    residual: Float[Tensor, "num_tokens out"] | None = None,
    gated: bool = False,
    activation: str = "silu",
    in_place: bool = False,
    arrivals: Arrivals | None = None,
) -> Float[Tensor, "num_tokens out"]:
    """Compute a linear layer for x that `supports` accepts. All tensors but x are contiguous.

    Args:
        weight: its rows are the outputs. If gated, those of the gate and then as many of up.
        residual: added to the outputs.
        gated: activation(gate) * up is returned.
        activation: "silu" or "gelu_tanh".
        in_place: the result is written over the residual.
        arrivals: the layer's counters. None: the inputs are not split.
    """
    num_out = len(weight) // (1 + gated)
    out = x.new_empty(len(x), num_out) if residual is None or not in_place else residual
    num_programs, num_splits, partial, counters = triton.cdiv(num_out, COLUMNS), 1, None, None
    if arrivals is not None:
        num_splits = num_splits_of(num_out, weight.shape[1])
        if num_splits > 1:
            partial = x.new_empty(num_splits, MAX_ROWS, num_programs * COLUMNS, dtype=torch.float32)
            counters = arrivals.counters(num_programs, x.device)
    _linear_kernel[(num_programs, num_splits)](
        x, weight, bias, residual, out, partial, counters, x.stride(0), len(x), weight.shape[1], num_out, gated, activation,
        MAX_ROWS, COLUMNS, TILE, num_splits, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
