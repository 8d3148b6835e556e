"""The threads of a step: kernels share its work among them, and torch's operators run on the calling thread alone.

An operator of torch that starts OpenMP's threads leaves them spinning for milliseconds on the cores that the kernels need. This
file changes the settings of the calling thread. torch.set_num_threads also writes a variable that other threads read.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from nanoinfer.system import process


class _Step(threading.local):
    num_threads = 0  # of the kernels, while this thread computes a step


_step = _Step()


def num_threads() -> int:
    """Return the number of threads of a kernel: torch's when the step began, unless the process was forked."""
    return _step.num_threads or process.num_kernel_threads or torch.get_num_threads()


@contextmanager
def one_torch_thread(num_kernel_threads: int | None = None) -> Iterator[None]:
    """Run torch's operators on the calling thread alone, also those of a user's functions that a step calls.

    num_kernel_threads: the number of threads of a kernel. None: num_threads() before.
    """
    if _step.num_threads:  # a step has begun
        yield
        return
    num, _step.num_threads = torch.get_num_threads(), num_kernel_threads or num_threads()
    set_openmp, set_mkl = _setters()
    set_openmp(1)
    mkl_num = set_mkl(1)
    try:
        yield
    finally:
        _step.num_threads = 0
        set_openmp(num)
        set_mkl(mkl_num)


@cache
def _setters() -> list[Callable[[int], int]]:
    """Return the functions that set the calling thread's numbers for OpenMP and MKL, which computes products and exp."""
    libraries = ctypes.CDLL(torch._C.__file__)
    # Where torch has no such library, `int` takes the place of its function.
    return [getattr(libraries, name, int) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")]
