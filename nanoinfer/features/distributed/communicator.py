"""Collectives of one engine's ranks: shared memory on one CPU machine, else gloo on CPUs, and NCCL on GPUs.

In: tensors of this rank. Out: their sum over the ranks, or the tensors of all ranks. A process group belongs to one engine, and
torch's default group is not used, so a process may have several engines.

A step of GPT-2 has 25 sums over the ranks. Through gloo, which uses sockets and its own thread, each takes hundreds of
microseconds on busy cores, while shared memory (exchange.cpp) takes about as long as reading the tensors. It is used between
ranks that LLM has started on Linux. The memory has no name, only a file descriptor that the ranks inherit, so nothing is left
when they end.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_int, c_int64, c_void_p
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from nanoinfer.errors import NanoinferError, UnsupportedError, first_line
from nanoinfer.fast.cpu import native
from nanoinfer.system.process import set_cuda_device

CONNECT_TIMEOUT = timedelta(minutes=5)

EXCHANGE = Path(__file__).with_name("exchange.cpp")
CAPACITY = 2**23  # maximum bytes of a tensor: larger tensors go through gloo. Memory is taken on first use
_LINE = 64  # bytes from one rank's flag to the next
_PATIENCE = 100  # milliseconds after which a waiting rank checks whether the others are alive


class RankLostError(NanoinferError):
    """A collective failed because another rank has ended."""


class Communicator:
    """The connection of a rank to the others. All ranks make the same calls in the same order, with equal shapes and dtypes.

    The constructor connects to all ranks, and waits for them. rank: in 0 .. size - 1.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, *, is_one_machine: bool) -> None:
        """is_one_machine: whether all ranks are on this machine. CPU ranks then use only its loopback address."""
        self.rank, self.size = rank, size
        self._device = device
        self._memory: SharedMemory | None = None
        with _losses_named():
            if device.type == "cuda":
                set_cuda_device(device)
                self._group: Any = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
            elif is_one_machine:
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname="127.0.0.1")]
                self._group = gloo(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, CONNECT_TIMEOUT)

    def all_reduce(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the sum over the ranks. Every rank gets the same bits, which do not depend on an element's place.

        On a CPU the terms are added in the order of the ranks. gloo's own sum starts at a different rank in each part of a
        tensor, so with three ranks or more a row's bits would depend on its place in the batch.
        """
        if self._device.type == "cuda":
            x = x.contiguous()
            with _losses_named():
                self._group.allreduce([x]).wait()
            return x
        first, second, *others = self._gather_briefly(x)
        total: Tensor = first + second
        for other in others:
            total += other
        return total

    def share_memory(self, descriptor: int, check_others: Callable[[], None]) -> None:
        """Use memory that CPU ranks share, if every rank can. check_others: raises if another rank has ended."""
        memory = None
        with suppress(UnsupportedError):
            memory = SharedMemory(descriptor, self.rank, self.size, check_others)
        if self.minimum(memory is not None):
            self._memory = memory

    def all_gather(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """Return the tensors of all ranks."""
        gathered = self._gather_briefly(x)
        return gathered.clone() if self._memory is not None else gathered

    def _gather_briefly(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """Return the tensors of all ranks, perhaps in memory that the next call overwrites."""
        if self._memory is not None and 0 < x.nbytes <= CAPACITY:
            return self._memory.all_gather(x)
        out = x.new_empty(self.size * x.numel())
        with _losses_named():
            self._group._allgather_base(out, x.flatten()).wait()
        return out.view(self.size, *x.shape)

    def broadcast(self, x: Shaped[Tensor, "..."]) -> None:
        """Overwrite a tensor by rank 0's."""
        x.copy_(self.all_gather(x)[0])

    def minimum(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        return int(self.all_gather(torch.tensor([number], device=self._device)).min())


@contextmanager
def _losses_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"the connection between the ranks has failed: {first_line(error)}") from error


def create_shared_memory(size: int) -> int | None:
    """Return the file descriptor of memory for `size` ranks, or None if the system has no such memory."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("nanoinfer")
    os.ftruncate(descriptor, size * (_LINE + 2 * CAPACITY))
    return descriptor


class SharedMemory:
    """A rank's view of the memory. All ranks make the same calls in the same order. check_others: raises if a rank has ended.

    Without a C++ compiler the constructor raises an UnsupportedError.
    """

    def __init__(self, descriptor: int, rank: int, size: int, check_others: Callable[[], None]) -> None:
        library = native.load(EXCHANGE)
        self._publish, self._await_all = library.publish, library.await_all
        self._publish.argtypes = [c_void_p, c_int, c_int, c_int64, c_int64, c_void_p, c_int64]
        self._publish.restype = None
        self._await_all.argtypes, self._await_all.restype = [c_void_p, c_int, c_int64, c_int], c_int
        self._rank, self._size, self._check_others = rank, size, check_others
        self._number = 0
        self._pages = mmap.mmap(descriptor, size * (_LINE + 2 * CAPACITY))
        self._address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()

    def all_gather(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """Return the tensors of all ranks, of at most CAPACITY bytes each, as views that the next call may overwrite."""
        x = x.contiguous()
        self._number += 1
        self._publish(self._address, self._rank, self._size, CAPACITY, self._number, x.data_ptr(), x.nbytes)
        while not self._await_all(self._address, self._size, self._number, _PATIENCE):
            self._check_others()
        start = self._size * _LINE + (self._number & 1) * self._size * CAPACITY
        buffers = torch.frombuffer(self._pages, dtype=x.dtype, offset=start, count=self._size * CAPACITY // x.itemsize)
        return buffers.view(self._size, -1)[:, : x.numel()].view(self._size, *x.shape)
