"""Ranks that are threads of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from nanoinfer.features.distributed.communicator import Communicator


class Member(Communicator):
    """A rank's Communicator to other threads. sent: what this rank sent, as (dtype, number of elements)."""

    def __init__(self, rank, size, barrier=None, tensors=None):
        self.rank, self.size, self.sent = rank, size, []
        self._barrier, self._tensors = barrier, tensors

    def all_gather(self, x):
        self.sent.append((x.dtype, x.numel()))
        self._tensors[self.rank] = x
        self._barrier.wait(600)
        gathered = torch.stack(self._tensors)
        self._barrier.wait(600)  # no rank sends again before all have read
        return gathered

    def all_reduce(self, x):
        return sum(self.all_gather(x))

    def minimum(self, number):
        return min(self.all_gather(torch.tensor(number)).tolist())


def on_ranks(size, function):
    """What function(communicator) returns on each rank."""
    barrier, tensors = threading.Barrier(size), [None] * size

    def run(rank):
        try:
            with torch.inference_mode():
                return function(Member(rank, size, barrier, tensors))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
