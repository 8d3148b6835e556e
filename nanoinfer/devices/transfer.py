"""Host to device without waiting: numbers that were made by Python reach a GPU while it is still at work on something else.

An ordinary copy from the host's memory first waits for everything the GPU has been given. From pinned memory it takes its turn
in the queue. torch keeps freed pinned memory and hands it out again once the copies from it are done.
"""

from itertools import chain

import torch
from jaxtyping import Int
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor, or on another device a copy of it that is there for whatever is launched after this."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def integers_on_device(lists: list[list[int]], device: torch.device) -> list[Int[Tensor, "..."]]:
    """A tensor for each list, in one copy. (On a CPU they stay apart: views of one tensor would differ in their offset, and
    torch.compile would compile for each.)
    """
    if device.type == "cpu":
        return [torch.tensor(numbers, dtype=torch.int64) for numbers in lists]
    # Each begins at a multiple of 16 bytes: Triton compiles a kernel once more for a pointer that does not.
    even = [numbers + [0] * (len(numbers) % 2) for numbers in lists]
    parts = on_device(torch.tensor(list(chain.from_iterable(even)), dtype=torch.int64), device).split(list(map(len, even)))
    return [part[: len(numbers)] for part, numbers in zip(parts, lists, strict=True)]
