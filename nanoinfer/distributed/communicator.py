"""Collectives of one engine's ranks: shared memory on one CPU machine, else gloo on CPUs, and NCCL on GPUs.

In: tensors of this rank. Out: their sum over the ranks, or the tensors of all ranks. A process group belongs to one engine, and
torch's default group is not touched, so several engines may be in one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from nanoinfer.distributed.shared_memory import CAPACITY, SharedMemory
from nanoinfer.errors import NanoinferError, UnsupportedError, first_line
from nanoinfer.system.process import set_cuda_device

CONNECT_TIMEOUT = timedelta(minutes=5)


class RankLostError(NanoinferError):
    """A collective failed, because another rank has ended."""


class ProcessGroupCommunicator:
    """The Communicator of parallel_layers.py over torch.distributed. Connects when it is made, which waits for all ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, *, is_one_machine: bool) -> None:
        """is_one_machine: whether all ranks are on this machine. CPU ranks are then reached by its loopback address alone."""
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
        """The sum over the ranks.

        On a CPU the terms are added in the order of the ranks. gloo's own sum begins with another rank in each part of a
        tensor, so with three ranks or more a row's bits would depend on its place in the batch.
        """
        if self._device.type == "cuda":
            x = x.contiguous()
            with _losses_named():
                self._group.allreduce([x]).wait()
            return x
        first, second, *others = self._gather_briefly(x)
        total = first + second
        for other in others:
            total += other
        return total

    def share_memory(self, descriptor: int, check_others: Callable[[], None]) -> None:
        """Use memory that CPU ranks share (shared_memory.py), if every rank can. check_others: raises if one has ended."""
        memory = None
        with suppress(UnsupportedError):
            memory = SharedMemory(descriptor, self.rank, self.size, check_others)
        if self.minimum(memory is not None):
            self._memory = memory

    def all_gather(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """The tensors of all ranks."""
        gathered = self._gather_briefly(x)
        return gathered.clone() if self._memory is not None else gathered

    def _gather_briefly(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """The tensors of all ranks, perhaps in memory that the next call overwrites."""
        if self._memory is not None and 0 < x.nbytes <= CAPACITY:
            return self._memory.all_gather(x)
        out = x.new_empty(self.size * x.numel())
        with _losses_named():
            self._group._allgather_base(out, x.flatten()).wait()
        return out.view(self.size, *x.shape)

    def minimum(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return int(self.all_gather(torch.tensor([number], device=self._device)).min())


@contextmanager
def _losses_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"the connection between the ranks has failed: {first_line(error)}") from error
