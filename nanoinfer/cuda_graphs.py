"""Recordings of what is launched on a GPU: a CUDA graph starts at once what Python would launch piece by piece.

In: a function that launches the same kernels on the same memory each time, and asks the host for nothing. Out: a Recording,
which does it again. A decode step of a small model, or the draw of its tokens, is hundreds of kernels that each run for
microseconds, and Python cannot launch them so fast. What changes from step to step is copied into places that never move
before a replay, and the number of rows is padded to one of a few sizes, each recorded when it first comes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoinfer.errors import first_line

logger = logging.getLogger(__name__)

# Records what a function launches. Returns a replay of it, and the tensor that the replay fills.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


@dataclass(frozen=True, slots=True)
class Recording:
    """out: what a replay fills. It stays as it is until another recording of the same Capture is replayed."""

    replay: Callable[[], None]
    out: Tensor


def record(name: str, run: Callable[[], Tensor], capture: Capture) -> Recording | None:
    """None: it could not be recorded, which is told. name: "the draw of 8 tokens", say."""
    try:
        return Recording(*capture(run))
    except RuntimeError as error:  # torch's, out of memory included
        logger.warning("%s could not be recorded (%s); such steps run as they come", name, first_line(error))
        return None


def sizes_up_to(max_num_rows: int) -> list[int]:
    """The numbers of rows that are recorded.

    >>> sizes_up_to(40)
    [1, 2, 4, 8, 16, 32, 40]
    """
    return [*(size for size in (1, 2, 4, 8) if size < max_num_rows), *range(16, max_num_rows, 16), max_num_rows]


class CUDACapture:
    """A Capture of CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle of it
        self._stream = torch.cuda.Stream()  # one for all: each would have a workspace of its own

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        before = torch.cuda.memory_reserved()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and chooses algorithms, neither of which can be recorded
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = run()
        self._pool = graph.pool()
        taken = (torch.cuda.memory_reserved() - before) / 2**20
        logger.info("recorded a CUDA graph for %d rows (%.0f MiB); enforce_eager=True does without", len(out), taken)
        return graph.replay, out
