"""Programs: calls of C++ kernels in a row, without Python between them.

In: kernel calls, built once. Out: a callable that gets the rows and arrays of a batch. In a small model a kernel takes a few
microseconds, which is also the cost of a call from Python. program.h has the C++ side.
"""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoinfer.errors import MORE_THREADS, OutOfMemoryError
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.threads import num_threads

logger = logging.getLogger(__name__)


def fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a structure as C++ declares them. groups: a type with the names of its consecutive fields."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class Slice(ctypes.Structure):
    """The place of a value's rows: row i begins at number first + i * stride of an array. array: -1: there is no value."""

    _fields_ = fields((c_int64, "array first stride"))


NOTHING = Slice(-1, 0, 0)


class KernelCall(ctypes.Structure):
    """A kernel's function and its arguments. The caller keeps the tensors alive whose addresses the arguments hold."""

    _fields_ = fields((c_void_p, "kernel arguments"))

    def __init__(self, kernel: Any, arguments: ctypes.Structure) -> None:
        """kernel: a function of a library."""
        super().__init__(ctypes.cast(kernel, c_void_p).value, ctypes.addressof(arguments))
        self.kept = arguments


class Program:
    """Kernel calls, in order.

    Raises:
        UnsupportedError: there is no C++ compiler, or it failed.
    """

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        self._run = _library().run
        self._kept, self._calls = calls, (KernelCall * len(calls))(*calls)

    def __call__(self, num_rows: int, arrays: Sequence[Tensor | ctypes.Structure | None]) -> None:
        """Make the calls. arrays: the arrays to whose indices the calls' arguments refer. Raises: OutOfMemoryError."""
        pointers = [_address_of(array) for array in arrays]
        batch = (c_int64 * (1 + len(pointers)))(num_rows, *pointers)
        if state := self._run(self._calls, len(self._calls), batch, num_threads()):
            _explain(state)


@cache  # a line is logged once
def _explain(state: int) -> None:
    """Raise an error or log a line, for what a program returned (program.cpp). Raises: OutOfMemoryError."""
    if state == 1:
        raise OutOfMemoryError("memory ran out in a step; lower max_num_batched_tokens or kv_cache_memory, or raise ulimit -v")
    logger.warning("the kernels have fewer than %d threads, because the system starts no more; %s", num_threads(), MORE_THREADS)


def _address_of(array: Tensor | ctypes.Structure | None) -> int:
    if array is None:
        return 0
    return array.data_ptr() if isinstance(array, Tensor) else ctypes.addressof(array)


@cache
def has_tiles() -> bool:
    """Whether the processor multiplies in tiles (tiles.h) and the system lets this process use them. It is checked once."""
    return bool(_library().has_tiles())


def tile_definitions(dtype: torch.dtype, num_inputs: int) -> list[str]:
    """Return the definition that makes a kernel multiply in tiles, if it can. num_inputs: the number of products per sum."""
    is_tiled = dtype is torch.bfloat16 and num_inputs % 32 == 0 and has_tiles()  # an instruction multiplies 32
    return ["TILES"] if is_tiled else []


@cache
def _library() -> ctypes.CDLL:
    library = native.load(Path(__file__).with_name("program.cpp"), structures=(KernelCall,))
    library.run.argtypes, library.run.restype = [c_void_p, c_int64, c_void_p, c_int], c_int
    return library
