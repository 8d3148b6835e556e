"""All-gather among processes of one machine through shared memory (exchange.cpp).

In: a tensor of each rank. Out: the tensors of all ranks. A step of GPT-2 has 25 sums over the ranks. Through gloo, which uses
sockets and a thread of its own, each takes hundreds of microseconds on busy cores, while shared memory takes about as long as
reading the tensors. It is used between ranks that LLM has started on Linux. The memory has no name, only a file descriptor that
the ranks inherit, so nothing is left when they end.
"""

import mmap
import os
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from nanoinfer.fast.cpu import native

SOURCE = Path(__file__).with_name("exchange.cpp")
CAPACITY = 2**23  # maximum bytes of a tensor (larger ones go through gloo), whose memory is taken when it is first used
_LINE = 64  # bytes between the ranks' flags
_PATIENCE = 100  # milliseconds after which a rank that waits checks whether the others are alive


def create(size: int) -> int | None:
    """Return the file descriptor of memory for `size` ranks, or None where the system has no such memory."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("nanoinfer")
    os.ftruncate(descriptor, num_bytes(size))
    return descriptor


def num_bytes(size: int) -> int:
    return size * _LINE + 2 * size * CAPACITY


class SharedMemory:
    """One rank's view of the memory. All ranks make the same calls in the same order, and check_others raises if one has ended.

    Without a C++ compiler the constructor raises an UnsupportedError.
    """

    def __init__(self, descriptor: int, rank: int, size: int, check_others: Callable[[], None]) -> None:
        library = native.load(SOURCE)
        self._publish, self._await_all = library.publish, library.await_all
        self._publish.argtypes = [c_void_p, c_int, c_int, c_int64, c_int64, c_void_p, c_int64]
        self._publish.restype = None
        self._await_all.argtypes, self._await_all.restype = [c_void_p, c_int, c_int64, c_int], c_int
        self._rank, self._size, self._check_others = rank, size, check_others
        self._number = 0
        self._pages = mmap.mmap(descriptor, num_bytes(size))
        self._address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()

    def all_gather(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """Return the tensors of all ranks, of at most CAPACITY bytes each, as views that the next call may overwrite."""
        x = x.contiguous()
        self._number += 1
        self._publish(self._address, self._rank, self._size, CAPACITY, self._number, x.data_ptr(), x.nbytes)
        while not self._await_all(self._address, self._size, self._number, _PATIENCE):
            self._check_others()
        start = self._size * _LINE + (self._number & 1) * self._size * CAPACITY
        slots = torch.frombuffer(self._pages, dtype=x.dtype, offset=start, count=self._size * CAPACITY // x.itemsize)
        return slots.view(self._size, -1)[:, : x.numel()].unflatten(1, x.shape)
