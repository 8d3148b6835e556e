"""Copies between the host and a device that do not wait for the device.

An ordinary copy from the host's memory waits for all work in the GPU's queue, while a copy from pinned memory is queued. torch
keeps freed pinned memory, and reuses it when the copies from it have ended.
"""

from array import array
from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a CPU, or its copy on another device, which kernels launched after this call see."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def integers_on_device(lists: list[list[int]], device: torch.device) -> list[Int[Tensor, "..."]]:
    """Return a tensor of each list, as slices of a single tensor that is copied in one transfer."""
    # Each starts at a multiple of 16 bytes, because Triton compiles a separate kernel for other pointers.
    parts = [part for numbers in lists for part in (numbers, [0] * (len(numbers) % 2))]
    joined = array("q", list(chain.from_iterable(parts)))  # takes a third of torch.tensor's time
    return list(on_device(torch.frombuffer(joined, dtype=torch.int64), device).split(list(map(len, parts))))[::2]


class HostCopy:
    """Copies of tensors in the host's memory, which are queued behind the device's earlier work, and before its later work."""

    def __init__(self, *tensors: Tensor) -> None:
        """Start the copies. Tensors of a CPU are not copied."""
        self._on_host, self._is_there = [*tensors], None
        if tensors[0].device.type != "cpu":
            self._on_host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for target, tensor in zip(self._on_host, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            self._is_there = torch.get_device_module(tensors[0].device).Event()
            self._is_there.record()

    def read(self) -> list[Tensor]:
        """Wait for the copies, and return them."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._on_host
