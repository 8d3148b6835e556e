"""Weights in 4 bits, rounded by how much each input counts: by the sum of its squares over some tokens, its moment.

In: weights in groups, and the moments of their inputs. Out: integers, scales and zeros. Of the ranges that rounding.cpp tries
for a group, it takes the one with the least sum of squared errors times moments. Its sums have an order of their own, so equal
moments give equal integers on any processor, rank and number of threads. A MeasuredLinear finds the moments.

Source: the importance matrix of llama.cpp, https://github.com/ggml-org/llama.cpp/pull/4861
"""

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.linear import PackedLinear
from nanoinfer.fast.cpu.program import KernelCall, Program, fields
from nanoinfer.fast.fuse import FusedLinear

Moments = Mapping[str, Float[Tensor, " in"]]  # the name of a weight in the checkpoint -> the moments of the layer's inputs


class RoundingCall(ctypes.Structure):
    _fields_ = fields((c_int64, "num_groups group_size"))


class MeasuredCall(ctypes.Structure):
    kept: object  # what the fields point to
    _fields_ = fields((KernelCall, "call"), (c_void_p, "sums"))


def rounded(groups: Float[Tensor, "out groups group"], moments: Float[Tensor, " in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights to 4 bits. An input without a moment counts as much as the mean."""
    is_known = moments.isfinite() & (moments > 0)
    known = moments[is_known].tolist()
    counts = torch.where(is_known, moments / (math.fsum(known) / len(known) if known else 1.0), 1.0)
    num_out, num_groups, group_size = groups.shape
    integers, zeros = (torch.empty(num_out, size, dtype=torch.uint8) for size in (num_groups * group_size, num_groups))
    scales = torch.empty(num_out, num_groups)
    call = KernelCall(_library().round_weights, RoundingCall(num_groups, group_size))
    Program([call])(num_out, (groups.contiguous(), counts, integers, scales, zeros))
    return integers, scales, zeros


class MeasuredLinear(PackedLinear):
    """A linear layer that adds the squares of its inputs to `sums`."""

    def __init__(self, fused: FusedLinear, sums: Float[Tensor, " in"], **options: Any) -> None:
        super().__init__(fused, **options)
        self._sums = sums

    def call(self, **slices: Any) -> KernelCall:
        inner = super().call(**slices)
        arguments = MeasuredCall(inner, self._sums.data_ptr())
        arguments.kept = self._sums, inner
        return KernelCall(_library().measure, arguments)


def _library() -> ctypes.CDLL:
    return native.load(Path(__file__).with_name("rounding.cpp"), structures=(RoundingCall, MeasuredCall))
