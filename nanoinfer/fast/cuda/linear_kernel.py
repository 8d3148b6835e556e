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
from nanoinfer.fast.cuda.integers import Integers, _load_groups, _widened

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


@triton.jit
def _add_integers(
    total, x, weight, scales, zeros, rows, columns, first, x_stride, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the products of TILE inputs, with weights that are widened to the dtype of x."""
    SIZE: tl.constexpr = TILE * BITS // 8  # of a part
    BYTES: tl.constexpr = GROUP * BITS // 8
    groups = first // GROUP + tl.arange(0, TILE // GROUP)
    packed, scale, zero = _load_groups(weight, scales, zeros, columns, groups, NUM_IN, NUM_OUT, GROUP, BITS)
    for part in tl.static_range(8 // BITS):
        numbers = tl.arange(0, SIZE)
        inputs = first + numbers // BYTES * GROUP + part * BYTES + numbers % BYTES
        mask = (rows < num_rows)[:, None] & (inputs < NUM_IN)[None, :]
        tile = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=mask, other=0.0)
        wide = tl.reshape(_widened(packed, scale, zero, part, BITS), (total.shape[1], SIZE)).to(x.dtype.element_ty)
        total = tl.dot(tile, tl.trans(wide), total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, scales, zeros, bias, residual, out, partial, num_arrived, x_stride, num_rows, NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of all rows, from a part of the inputs. The last program of the columns adds the parts.

    GATED: the weight has the rows of the gate, and after them those of up. partial: [splits, ROWS, columns].
    scales, zeros: of a weight in BITS bits, as in integers.py. None: the weight has the dtype of x.
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
        if scales is not None:
            total = _add_integers(
                total, x, weight, scales, zeros, rows, columns, begin + first, x_stride, num_rows, NUM_IN,
                NUM_OUT * (1 + GATED), GROUP, BITS, TILE,
            )  # fmt: skip
            if GATED:
                up = _add_integers(
                    up, x, weight, scales, zeros, rows, columns + NUM_OUT, begin + first, x_stride, num_rows, NUM_IN,
                    NUM_OUT * (1 + GATED), GROUP, BITS, TILE,
                )  # fmt: skip
        else:
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
    weight: Float[Tensor, "rows in"] | Integers,
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
        weight: its rows are the outputs. If gated, those of the gate and then as many of up. Integers are widened on the way.
        residual: added to the outputs.
        gated: activation(gate) * up is returned.
        activation: "silu" or "gelu_tanh".
        in_place: the result is written over the residual.
        arrivals: the layer's counters. None: the inputs are not split.
    """
    given = (*weight[:3], weight.group_size, weight.bits) if isinstance(weight, Integers) else (weight, None, None, 0, 0)
    num_out, num_in = len(given[0]) // (1 + gated), x.shape[1]
    out = x.new_empty(len(x), num_out) if residual is None or not in_place else residual
    num_programs, num_splits, partial, counters = triton.cdiv(num_out, COLUMNS), 1, None, None
    if arrivals is not None:
        num_splits = num_splits_of(num_out, num_in)
        if num_splits > 1:
            partial = x.new_empty(num_splits, MAX_ROWS, num_programs * COLUMNS, dtype=torch.float32)
            counters = arrivals.counters(num_programs, x.device)
    _linear_kernel[(num_programs, num_splits)](
        x, *given[:3], bias, residual, out, partial, counters, x.stride(0), len(x), num_in, num_out, *given[3:], gated,
        activation, MAX_ROWS, COLUMNS, TILE, num_splits, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
