"""CUDA graphs: capture a sequence of kernel launches once, and replay it with a single launch.

In: a function that launches the same kernels on the same memory each time and never synchronizes with the host. Out: a
CapturedGraph. A decode step of a small model, or the sampling of its tokens, launches hundreds of kernels of microseconds each,
and Python cannot launch them fast enough. Whatever changes from step to step is copied into static input tensors before a
replay. The number of rows is padded to one of a few sizes, each of which is captured on first use.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoinfer.errors import first_line

logger = logging.getLogger(__name__)

# Captures what a function launches. Returns its replay, and the tensor that the replay fills.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """out: the tensor that a replay fills. It is valid until another graph of the same Capture is replayed."""

    replay: Callable[[], None]
    out: Tensor


def capture_graph(name: str, run: Callable[[], Tensor], capture: Capture) -> CapturedGraph | None:
    """Capture `run`, or log a warning and return None. name: the graph's name in the log, such as "a decode step of 8 rows"."""
    try:
        return CapturedGraph(*capture(run))
    except RuntimeError as error:  # torch's, also when memory runs out
        logger.warning("%s could not be captured as a CUDA graph (%s); such steps run without one", name, first_line(error))
        return None


def capture_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of rows for which graphs are captured.

    >>> capture_sizes(40)
    [1, 2, 4, 8, 16, 32, 40]
    """
    return [*(size for size in (1, 2, 4, 8) if size < max_num_rows), *range(16, max_num_rows, 16), max_num_rows]


class CUDACapture:
    """Captures CUDA graphs, which share a memory pool, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle of torch
        self._stream = torch.cuda.Stream()  # shared, since every stream has its own workspace

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        before = torch.cuda.memory_reserved()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and selects algorithms, which cannot be captured
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = run()
        self._pool = graph.pool()
        taken = (torch.cuda.memory_reserved() - before) / 2**20
        logger.info("captured a CUDA graph for %d rows (%.0f MiB); enforce_eager=True disables CUDA graphs", len(out), taken)
        return graph.replay, out
