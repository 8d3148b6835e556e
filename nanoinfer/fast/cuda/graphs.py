"""CUDA graphs: capture a sequence of kernel launches once, and replay it with a single launch. Decode steps run so.

In: a function that launches the same kernels on the same memory each time and never synchronizes with the host. Out: a
CapturedGraph. A decode step of a small model, or the sampling of its tokens, launches hundreds of kernels of microseconds each,
and Python cannot launch them fast enough. Whatever changes from step to step is copied into static input tensors before a
replay. The number of rows is padded to one of a few sizes, each of which is captured on first use and reads the first rows of
the same tensors. The padding rows of a decode step read and write a block of their own, which no sequence has.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.errors import first_line
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch

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

    def __init__(self, device: torch.device) -> None:
        self._gpu: Any = torch.get_device_module(device)
        self._pool: Any = None  # a handle of torch
        self._stream = self._gpu.Stream()  # shared, since every stream has its own workspace

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        gpu = self._gpu
        before = gpu.memory_reserved()
        self._stream.wait_stream(gpu.current_stream())
        with gpu.stream(self._stream):
            run()  # compiles kernels and selects algorithms, which cannot be captured
        gpu.current_stream().wait_stream(self._stream)
        graph = gpu.CUDAGraph()
        # thread_local: other threads, such as a server's, may use the GPU meanwhile.
        with gpu.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        taken = (gpu.memory_reserved() - before) / 2**20
        logger.info("captured a CUDA graph for %d rows (%.0f MiB); enforce_eager=True disables CUDA graphs", len(out), taken)
        return graph.replay, out


class DecodeGraphs:
    """CUDA graphs of the forward pass of a decode step, by number of rows: 1, 2, 4, 8, 16, 32, 48 and so on.

    info: the sizes of the cache. The padding rows use the block after its last, which the cache must have as well.
    """

    def __init__(self, info: ExecutorInfo, max_num_rows: int, capture: Capture) -> None:
        self.sizes = capture_sizes(max_num_rows)
        self._max_model_len = info.max_model_len
        self._max_blocks = -(-info.max_model_len // info.block_size)
        self._padding_block = info.num_blocks
        self._padding_slot = info.num_blocks * info.block_size
        self._capture = capture
        self._rows: dict[str, Tensor] = {}  # the tensors that the graphs read, for the largest size
        # Number of rows -> the graph's rows of these tensors, and the graph, which is None if it could not be captured.
        self._graphs: dict[int, tuple[ForwardBatch, CapturedGraph | None]] = {}

    def supports(self, batch: ForwardBatch) -> bool:
        """Whether every sequence of the step has one new token, and their number is at most the largest captured size."""
        return batch.attention.num_decodes == len(batch.input_ids) <= self.sizes[-1]

    def replay(self, batch: ForwardBatch, run: Callable[[ForwardBatch], Tensor]) -> Float[Tensor, "num_tokens hidden"]:
        """Return the hidden rows of run(batch), from the graph of the smallest sufficient size. It is captured on first use."""
        num_rows = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        if size not in self._graphs:
            static_inputs = self._make_static_inputs(size, 1 + len(batch.further_groups), batch.input_ids.device)
            self._fill(static_inputs, batch)
            graph = capture_graph(f"a decode step of {size} rows", lambda: run(static_inputs), self._capture)
            self._graphs[size] = static_inputs, graph
        static_inputs, graph = self._graphs[size]
        if graph is None:
            return run(batch)
        self._fill(static_inputs, batch)
        graph.replay()
        return graph.out[:num_rows]

    def _make_static_inputs(self, size: int, num_groups: int, device: torch.device) -> ForwardBatch:
        """Return the first rows of the tensors that graphs read, which the first call makes."""

        def rows(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> Int[Tensor, "..."]:
            if name not in self._rows:
                self._rows[name] = torch.zeros(self.sizes[-1], *shape, dtype=dtype, device=device)
            return self._rows[name][:size]

        attention, *further = (
            AttentionMetadata(
                query_start_loc=torch.arange(size + 1, device=device),
                seq_lens=rows(f"lengths {group}"),
                block_tables=rows(f"tables {group}", self._max_blocks, dtype=torch.int32),
                slot_mapping=rows(f"slots {group}"),
                max_query_len=1,
                max_seq_len=self._max_model_len,
                num_decodes=size,
                query_start_loc_cpu=list(range(size + 1)),
                seq_lens_cpu=[self._max_model_len] * size,
            )
            for group in range(num_groups)
        )
        return ForwardBatch(rows("ids"), rows("positions"), slice(0, size), attention, [], tuple(further))

    def _fill(self, static_inputs: ForwardBatch, batch: ForwardBatch) -> None:
        """Copy a batch into the first rows, and make padding of the others: one token each, in the padding block."""
        padding = (0, 0, *(1, self._padding_slot, self._padding_block) * (1 + len(batch.further_groups)))
        for static_input, new, value in zip(_inputs(static_inputs), _inputs(batch), padding, strict=True):
            rows = static_input
            if (num_rows := new.shape[0]) < static_input.shape[0]:
                rows = static_input[:num_rows]
                static_input[num_rows:] = value
            (rows if new.ndim == 1 else rows[:, : new.shape[1]]).copy_(new)


def _inputs(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Return the tensors that change from step to step."""
    groups = (batch.attention, *batch.further_groups)
    return batch.input_ids, batch.positions, *(x for one in groups for x in (one.seq_lens, one.slot_mapping, one.block_tables))
