"""Kernels that share the rows of a step among threads on a CPU: the largest logits, the draw, and exponentials.

In: logits of a CPU, in the model's own dtype. Out: the largest ones in fp32 with their ids, or a token id per row. torch's
operators would have to start threads of their own, which spin on the cores of the kernels' threads (fast/cpu/threads.py).
"""

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Program, Slice, fields
from nanoinfer.sampling import exponentials
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import BITS

PART = 4096  # numbers that a thread computes at a time, of exponentials


class LargestCall(ctypes.Structure):
    _fields_ = fields((Slice, "logits values ids"), (ctypes.c_int64, "vocab_size num_columns"))


class Exponential(ctypes.Structure):
    """What sampling/exponentials.py computes with. The table is cached there."""

    _fields_ = fields((ctypes.c_void_p, "table"), (ctypes.c_double, "lowest scale first second"))

    def __init__(self, table: Float[Tensor, " steps"]) -> None:
        lowest = exponentials.STEPS - len(table)
        super().__init__(table.data_ptr(), lowest, exponentials.SCALE, exponentials.FIRST, exponentials.SECOND)


class DrawCall(ctypes.Structure):
    _fields_ = fields(
        (Slice, "logits largest temperatures u token_ids totals"), (ctypes.c_int64, "vocab_size"), (Exponential, "exponential")
    )


class ExponentialsCall(ctypes.Structure):
    _fields_ = fields((Slice, "below out"), (ctypes.c_int64, "num_numbers part"), (Exponential, "exponential"))


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    source, structures = Path(__file__).with_name("kernels.cpp"), (LargestCall, DrawCall, ExponentialsCall)
    return native.load(source, *native.definitions_of(dtype), structures=structures)


@cache
def has_kernels(device: str, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for logits of a type of device and a dtype, and whether they can be compiled."""
    with suppress(UnsupportedError):
        return device == "cpu" and _library(dtype) is not None
    return False


def find_largest(
    logits: Float[Tensor, "batch vocab"], num_columns: int
) -> tuple[Float[Tensor, "batch columns"], Int[Tensor, "batch columns"]]:
    """Return the largest logits of each row and their ids, in the order of the ids. Of equal logits the lowest ids are taken.

    A row with a NaN has NaNs, with any ids.
    """
    values = torch.empty(len(logits), num_columns)
    ids = torch.empty(len(logits), num_columns, dtype=torch.int64)
    _largest_program(logits.dtype, logits.shape[-1], num_columns)(len(logits), (logits.contiguous(), values, ids))
    return values, ids


@cache
def _largest_program(dtype: torch.dtype, width: int, num_columns: int) -> Program:
    call = LargestCall(Slice(0, 0, width), Slice(1, 0, num_columns), Slice(2, 0, num_columns), width, num_columns)
    return Program([KernelCall(_library(dtype).find_largest, call)])


def draw_from_all(
    logits: Float[Tensor, "batch vocab"], largest: Float[Tensor, " batch"], batch: SamplingBatch
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Draw from all weights after the temperature. largest: the largest logit of each row.

    Returns:
        The token ids, and the sum of each row's weights.
    """
    num_rows, width = logits.shape
    temperatures = batch.temperature
    if temperatures is None:
        temperatures = torch.ones(num_rows)
    token_ids, totals = torch.empty(2, num_rows, dtype=torch.int64)
    slices = Slice(0, 0, width), *(Slice(array, 0, 1) for array in range(1, 6))
    call = DrawCall(*slices, width, Exponential(exponentials.table(BITS)))
    arrays = logits.contiguous(), largest, temperatures, batch.u, token_ids, totals
    Program([KernelCall(_library(logits.dtype).draw, call)])(num_rows, arrays)
    return token_ids, totals


def use_exponentials() -> None:
    """Let exponentials.on_cpu be the kernel, in the whole process. It changes no bit, so every engine may use it.

    An assignment, because sampling/ does not import fast/. Raises: UnsupportedError without a C++ compiler.
    """
    kernel = _library(torch.float32).exponentials

    def by_kernel(below: Float[Tensor, "batch vocab"], table: Float[Tensor, " steps"]) -> Int[Tensor, "batch vocab"]:
        below, out = below.contiguous(), torch.empty(below.shape, dtype=torch.int64)
        call = ExponentialsCall(Slice(0, 0, PART), Slice(1, 0, PART), below.numel(), PART, Exponential(table))
        Program([KernelCall(kernel, call)])(-(-below.numel() // PART), (below, out))
        return out

    exponentials.on_cpu = by_kernel
