"""Find the largest logits of each row on a CPU, in the model's own dtype, by largest.cpp.

In: logits of a CPU. Out: the largest ones in fp32, with their ids. Of 64 rows of 50,257 logits it finds 72 in a third of the time
that torch.topk takes on one thread.
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


class LargestCall(ctypes.Structure):
    _fields_ = fields((Slice, "logits values ids"), (ctypes.c_int64, "vocab_size num_columns"))


def largest_by_kernel(
    logits: Float[Tensor, "batch vocab"], num_columns: int
) -> tuple[Float[Tensor, "batch columns"], Int[Tensor, "batch columns"]] | None:
    """Return the largest logits of each row and their ids, in the order of the ids. Of equal logits the lowest ids are taken.

    A row with a NaN has NaNs, with any ids. None: no kernel supports these logits.
    """
    library = None if logits.is_cuda else _library(logits.dtype)
    if library is None:
        return None
    values = torch.empty(len(logits), num_columns)
    ids = torch.empty(len(logits), num_columns, dtype=torch.int64)
    width = logits.shape[-1]
    call = LargestCall(Slice(0, 0, width), Slice(1, 0, num_columns), Slice(2, 0, num_columns), width, num_columns)
    Program([KernelCall(library.find_largest, call)])(len(logits), (logits.contiguous(), values, ids))
    return values, ids


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load the kernel for a dtype. None: it does not support the dtype, or cannot be compiled."""
    with suppress(UnsupportedError):
        source = Path(__file__).with_name("largest.cpp")
        return native.load(source, *native.definitions_of(dtype), structures=(LargestCall,))
    return None
