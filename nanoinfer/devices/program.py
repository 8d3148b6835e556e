"""Programs: steps of C++ kernels that run one after the other in one call, without Python between them.

In: steps, built once. Out: a callable that gets the rows and arrays of a batch. program.h has the form of a step. A step of a
small model takes a few microseconds, as does a call from Python.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoinfer.devices import native


class Step(NamedTuple):
    """A kernel's function, and the numbers and addresses of its arguments, 8 bytes each."""

    function: Any
    arguments: tuple[int, ...]


class Program:
    """Steps to run in their order. The caller keeps the tensors alive whose addresses the arguments hold.

    Raises:
        UnsupportedError: there is no C++ compiler, or it failed.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._run = _function()
        self._arguments = [(ctypes.c_int64 * len(step.arguments))(*step.arguments) for step in steps]
        self._steps = (ctypes.c_void_p * (2 * len(steps)))()
        for i, (step, arguments) in enumerate(zip(steps, self._arguments, strict=True)):
            self._steps[2 * i] = ctypes.cast(step.function, ctypes.c_void_p).value
            self._steps[2 * i + 1] = ctypes.addressof(arguments)
        self._num_steps = len(steps)

    def __call__(self, num_rows: int, arrays: Sequence[Tensor | None]) -> None:
        """Run the steps. arrays: contiguous, by the index that the steps' arguments name."""
        pointers = [0 if array is None else array.data_ptr() for array in arrays]
        batch = (ctypes.c_int64 * (1 + len(pointers)))(num_rows, *pointers)
        self._run(self._steps, self._num_steps, batch, torch.get_num_threads())


@cache
def _function() -> Any:
    function = native.load(Path(__file__).with_name("program.cpp")).run
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
    function.restype = None
    return function
