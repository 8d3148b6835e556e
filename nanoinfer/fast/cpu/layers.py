"""The kernels of layers.cpp: norms, sums, gates, the rotation of queries and keys. models/layers.py has their definitions."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import nn

from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Slice, fields
from nanoinfer.models.layers import RMSNorm, ZeroCentredRMSNorm


class NormCall(ctypes.Structure):
    _fields_ = fields(
        (Slice, "x out"), (c_void_p, "weight bias"), (c_int64, "size"), (c_double, "eps"), (c_int64, "is_zero_centred")
    )


class AddCall(ctypes.Structure):
    _fields_ = fields((Slice, "x y out"), (c_int64, "size"))


class GateCall(ctypes.Structure):
    _fields_ = fields((Slice, "x gate out"), (c_int64, "num_heads head_dim gate_step"))


class RotateCall(ctypes.Structure):
    _fields_ = fields(
        (Slice, "heads cos sin out"),
        (c_void_p, "weight"),
        (c_int64, "num_heads head_dim step num_rotated"),
        (c_double, "eps"),
        (c_int64, "is_zero_centred"),
    )


def has_kernel(norm: nn.Module | None) -> bool:
    """Whether norm_call supports this module: a norm over the last axis with a weight, and a bias if it is a LayerNorm."""
    if type(norm) is nn.LayerNorm:
        return norm.weight is not None and norm.weight.ndim == 1 and norm.bias is not None
    return isinstance(norm, RMSNorm) and type(norm) in (RMSNorm, ZeroCentredRMSNorm) and norm.weight.ndim == 1


def norm_call(norm: nn.LayerNorm | RMSNorm, x: Slice, out: Slice) -> KernelCall:
    library, weight = _library(norm.weight.dtype), norm.weight
    if isinstance(norm, RMSNorm):
        is_zero_centred = isinstance(norm, ZeroCentredRMSNorm)
        return KernelCall(library.rms_norm, NormCall(x, out, weight.data_ptr(), None, len(weight), norm.eps, is_zero_centred))
    return KernelCall(library.layer_norm, NormCall(x, out, weight.data_ptr(), norm.bias.data_ptr(), len(weight), norm.eps))


def add_call(dtype: torch.dtype, size: int, x: Slice, y: Slice, out: Slice) -> KernelCall:
    return KernelCall(_library(dtype).add, AddCall(x, y, out, size))


def gate_call(dtype: torch.dtype, num_heads: int, head_dim: int, gate_step: int, *slices: Slice) -> KernelCall:
    """Compute out = x * sigmoid(gate). slices: x, the gates and `out`. gate_step: numbers from one head's gates to the next."""
    return KernelCall(_library(dtype).gate, GateCall(*slices, num_heads, head_dim, gate_step))


def rotate_call(
    dtype: torch.dtype, shape: Sequence[int], norm: RMSNorm | None, *slices: Slice, num_rotated: int = 0, step: int = 0
) -> KernelCall:
    """Rotate the heads of each row, after a norm if there is one.

    Args:
        shape: the number of heads of a row, and the numbers of a head.
        slices: the heads, cos, sin, and the result, which may overwrite the heads.
        num_rotated: how many numbers of each head are rotated, from the first on. 0: all.
        step: how many numbers lie from one head to the next. 0: heads are contiguous.
    """
    weight, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
    sizes = *shape, step or shape[1], num_rotated or shape[1]
    return KernelCall(_library(dtype).rotate, RotateCall(*slices, weight, *sizes, eps, isinstance(norm, ZeroCentredRMSNorm)))


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    source = Path(__file__).with_name("layers.cpp")
    return native.load(source, *native.definitions_of(dtype), structures=(NormCall, AddCall, GateCall, RotateCall))
