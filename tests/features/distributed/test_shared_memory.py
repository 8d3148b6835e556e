"""Ranks gather through memory that they share. Here they are threads, as ctypes lets others run."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from nanoinfer.features.distributed.communicator import EXCHANGE, RankLostError, SharedMemory, create_shared_memory


@pytest.fixture
def descriptor():
    created = create_shared_memory(3)
    if created is None:
        pytest.skip("this system has no memory without a name")
    try:
        native.load(EXCHANGE)
    except UnsupportedError:
        pytest.skip("there is no C++ compiler")
    yield created
    os.close(created)


def tensor_of(rank, number):
    """Another shape and dtype for each number, the same on all ranks."""
    rng = random.Random(number)
    shape = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 4))]
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.int32])
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def test_every_rank_gets_the_tensors_of_all_ranks(descriptor):
    futures = []

    def check_others():
        for future in futures:
            if future.done():
                future.result()

    def run(rank):
        memory = SharedMemory(descriptor, rank, 3, check_others)
        for number in range(100):
            gathered = memory.all_gather(tensor_of(rank, number))
            for other in range(3):
                assert torch.equal(gathered[other], tensor_of(other, number))

    with ThreadPoolExecutor(3) as threads:
        futures += [threads.submit(run, rank) for rank in range(3)]
    for future in futures:
        future.result()


def test_a_rank_that_waits_notices_that_another_has_ended(descriptor):
    def check():
        raise RankLostError("gone")

    memory = SharedMemory(descriptor, 0, 3, check)
    with pytest.raises(RankLostError, match="gone"):
        memory.all_gather(torch.zeros(5))
