"""Weights in 4 bits, rounded by how much each input counts: by the sum of its squares over some tokens, its moment.

In: the weights of a linear layer in groups, and the moments of its inputs. Out: integers, scales and zeros. Of many ranges of a
group, rounding.cpp takes the one with the least squared error, each weight's times its moment. A layer's outputs then change
least where its inputs are large. Its sums have an order of their own, so equal moments give equal integers on any processor,
rank and number of threads. MeasuredLinear is a layer that finds the moments. calibration.py runs a model of such layers.

Source: the importance matrix of llama.cpp, https://github.com/ggml-org/llama.cpp/pull/4861. Lin et al. 2023,
https://arxiv.org/abs/2306.00978 (a few inputs count for most of the error).
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
from nanoinfer.fast.cpu.linear import LinearCall, PackedLinear
from nanoinfer.fast.cpu.program import KernelCall, Program, fields
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.loading.quantization import Rounded

Moments = Mapping[str, Float[Tensor, " in"]]  # the name of a weight in the checkpoint -> the moments of the layer's inputs


class RoundingCall(ctypes.Structure):
    """The sizes of a matrix (rounding.cpp)."""

    _fields_ = fields((c_int64, "num_groups group_size"))


class MeasuredCall(ctypes.Structure):
    """The call of a layer, and where the squares of its inputs are added (rounding.cpp). kept: what both point to."""

    kept: tuple[Tensor, KernelCall]
    _fields_ = fields((KernelCall, "call"), (c_void_p, "sums"))


def rounded(groups: Float[Tensor, "out groups group"], moments: Float[Tensor, " in"]) -> Rounded:
    """Round weights to 4 bits. An input of which no token had anything counts as much as the mean."""
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
    """A linear layer that adds the squares of its inputs to `sums`, [num_in]."""

    def __init__(self, fused: FusedLinear, *options: Any, sums: Float[Tensor, " in"], **more: Any) -> None:
        super().__init__(fused, *options, **more)
        self._sums = sums

    def call(self, **slices: Any) -> KernelCall:
        inner = super().call(**slices)
        arguments = MeasuredCall(inner, self._sums.data_ptr())
        arguments.kept = self._sums, inner
        return KernelCall(_library().measure, arguments)


def _library() -> ctypes.CDLL:
    """Load rounding.cpp. Raises: UnsupportedError."""
    return native.load(Path(__file__).with_name("rounding.cpp"), structures=(RoundingCall, MeasuredCall))
