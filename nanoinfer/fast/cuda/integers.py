"""Weights in 8 or 4 bits on a GPU: how they lie in memory, how kernels load them, and a kernel that widens them.

In: the integers, scales and zeros of features/quantization. Out: Integers, which integer_kernels.py and linear_kernel.py read.

The bytes of a group of inputs lie together, so that a thread loads 16 of them at once. In 4 bits, the first half of a group's
inputs are in the low halves of its bytes, and the second half in the high ones. So a kernel computes a group in `8 // BITS`
parts, and part p has the inputs from p * BYTES on, where a group has BYTES bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from nanoinfer.features.quantization.rounding import QuantizedWeight

_TILE = 2048  # the most inputs of a program that widens


class Integers(NamedTuple):
    """The weight scales * (integers - zeros), with a scale and a zero for each output and group of inputs. All contiguous."""

    packed: UInt8[Tensor, "out bytes"]
    scales: Float32[Tensor, "out groups"]
    zeros: UInt8[Tensor, "out groups"]
    bits: int  # 8 or 4

    @property
    def num_in(self) -> int:
        return self.packed.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale: 16, 32, 64 or 128."""
        return self.num_in // self.scales.shape[1]

    def rows(self, some: slice | Tensor) -> "Integers":
        """Return the weights of some outputs."""
        return Integers(self.packed[some], self.scales[some], self.zeros[some], self.bits)


def packed_bytes(weight: QuantizedWeight) -> UInt8[Tensor, "out bytes"]:
    """Return the integers of a weight as they lie in memory."""
    if weight.bits == 8:
        return weight.integers
    low, high = weight.integers.unflatten(1, (-1, 2, weight.group_size // 2)).unbind(2)
    packed: Tensor = low | high << 4
    return packed.flatten(1)


@triton.jit
def _load_groups(
    weight, scales, zeros, columns, groups, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Return the bytes of some groups of some outputs, [columns, groups, BYTES], their scales and zeros, [columns, groups]."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    inside = (columns < NUM_OUT)[:, None] & (groups < NUM_IN // GROUP)[None, :]
    at = columns[:, None].to(tl.int64) * (NUM_IN // GROUP) + groups[None, :]
    where = at[:, :, None] * BYTES + tl.arange(0, BYTES)[None, None, :]
    packed = tl.load(weight + where, mask=inside[:, :, None], other=0)
    return packed, tl.load(scales + at, mask=inside, other=0.0), tl.load(zeros + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def _integers_of(packed, PART: tl.constexpr, BITS: tl.constexpr):
    """Return the integers of a part of each group, in fp32."""
    if BITS == 4:
        packed = (packed >> (4 * PART)) & 15
    return packed.to(tl.float32)


@triton.jit
def _widened(packed, scale, zero, PART: tl.constexpr, BITS: tl.constexpr):
    """Return the weights of a part of each group, [columns, groups, BYTES], in fp32."""
    return (_integers_of(packed, PART, BITS) - zero[:, :, None]) * scale[:, :, None]


@triton.jit
def _widen_kernel(
    weight, scales, zeros, out, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write TILE weights of an output, in the dtype of `out`."""
    BYTES: tl.constexpr = GROUP * BITS // 8
    column = tl.program_id(0) + tl.arange(0, 1)
    groups = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    packed, scale, zero = _load_groups(weight, scales, zeros, column, groups, NUM_IN, NUM_OUT, GROUP, BITS)
    for part in tl.static_range(8 // BITS):
        inputs = (groups * GROUP + part * BYTES)[None, :, None] + tl.arange(0, BYTES)[None, None, :]
        wide = _widened(packed, scale, zero, part, BITS).to(out.dtype.element_ty)
        tl.store(out + column.to(tl.int64)[:, None, None] * NUM_IN + inputs, wide, mask=inputs < NUM_IN)


def widen(weight: Integers, out: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """Write the weight into `out`, which is contiguous, in its dtype. Returns `out`."""
    num_out, num_in = out.shape
    tile = min(triton.next_power_of_2(num_in), _TILE)
    grid = num_out, triton.cdiv(num_in, tile)
    _widen_kernel[grid](*weight[:3], out, num_in, num_out, weight.group_size, weight.bits, tile)
    return out


def definition(weight: Integers) -> Float32[Tensor, "out in"]:
    """Compute by torch what `widen` computes, in fp32."""
    groups = weight.packed.unflatten(1, (weight.scales.shape[1], -1))
    integers = groups if weight.bits == 8 else torch.cat((groups & 15, groups >> 4), dim=2)
    return ((integers.float() - weight.zeros.unsqueeze(2)) * weight.scales.unsqueeze(2)).flatten(1)
