"""Kernels that share the rows of a step among threads on a CPU, in the model's own dtype: the largest logits, and the draw.

In: logits of a CPU. Out: the largest ones in fp32 with their ids, or a token id per row. torch's operators would have to start
threads of their own, which spin on the cores of the kernels' threads (fast/cpu/threads.py).
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
from nanoinfer.sampling.batch import SamplingBatch


class LargestCall(ctypes.Structure):
    _fields_ = fields((Slice, "logits values ids"), (ctypes.c_int64, "vocab_size num_columns"))


class DrawCall(ctypes.Structure):
    _fields_ = fields((Slice, "logits temperatures u token_ids totals largest"), (ctypes.c_int64, "vocab_size"))


@cache
def kernels_for(device: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernels for logits of a type of device and a dtype. None: there are none, or they cannot be compiled."""
    with suppress(UnsupportedError):
        source, structures = Path(__file__).with_name("kernels.cpp"), (LargestCall, DrawCall)
        return native.load(source, *native.definitions_of(dtype), structures=structures) if device == "cpu" else None
    return None


def find_largest(
    kernels: ctypes.CDLL, logits: Float[Tensor, "batch vocab"], num_columns: int
) -> tuple[Float[Tensor, "batch columns"], Int[Tensor, "batch columns"]]:
    """Return the largest logits of each row and their ids, in the order of the ids. Of equal logits the lowest ids are taken.

    A row with a NaN has NaNs, with any ids.
    """
    values = torch.empty(len(logits), num_columns)
    ids = torch.empty(len(logits), num_columns, dtype=torch.int64)
    width = logits.shape[-1]
    call = LargestCall(Slice(0, 0, width), Slice(1, 0, num_columns), Slice(2, 0, num_columns), width, num_columns)
    Program([KernelCall(kernels.find_largest, call)])(len(logits), (logits.contiguous(), values, ids))
    return values, ids


def draw_from_all(
    kernels: ctypes.CDLL, logits: Float[Tensor, "batch vocab"], batch: SamplingBatch
) -> tuple[Int[Tensor, " batch"], Int[Tensor, "batch 2"], Float[Tensor, " batch"]]:
    """Draw from all weights after the temperature.

    The kernel's exp has other last bits than sampling/exponentials.py. It computes bounds of each weight, which decide nearly
    every row.

    Returns:
        The token ids, -1 where the bounds do not decide, the bounds of the sum of all weights, and the largest logits. A row
        whose largest logit is not finite has any id.
    """
    num_rows, width = logits.shape
    temperatures = batch.columns.temperature
    if temperatures is None:
        temperatures = torch.ones(num_rows)
    token_ids, largest = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    totals = torch.zeros(num_rows, 2, dtype=torch.int64)
    arrays = logits.contiguous(), temperatures, batch.u, token_ids, totals, largest
    call = DrawCall(Slice(0, 0, width), *(Slice(array, 0, 1) for array in range(1, 6)), width)
    Program([KernelCall(kernels.draw, call)])(num_rows, arrays)
    return token_ids, totals, largest
