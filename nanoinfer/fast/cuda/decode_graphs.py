"""Replay decode steps from CUDA graphs.

In: a ForwardBatch with one new token per sequence. Out: hidden rows. graphs.py says how graphs are captured and replayed. The
padding rows read and write a block of their own, which no sequence ever has.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.cuda.graphs import Capture, CapturedGraph, capture_graph, capture_sizes


class DecodeGraphs:
    """CUDA graphs of the forward pass of a decode step, by number of rows: 1, 2, 4, 8, 16, 32, 48 and so on.

    info: the sizes of the cache. The padding rows use a further block, which the cache must have after its last.
    """

    def __init__(self, info: ExecutorInfo, max_num_rows: int, capture: Capture) -> None:
        self.sizes = capture_sizes(max_num_rows)
        self._max_model_len = info.max_model_len
        self._max_blocks = -(-info.max_model_len // info.block_size)
        self._padding_block = info.num_blocks
        self._padding_slot = info.num_blocks * info.block_size
        self._capture = capture
        # Number of rows -> the tensors that the graph reads, and the graph, which is None if it could not be captured.
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
        """Make new tensors that contain only padding rows."""

        def rows(value: int, *shape: int) -> Int[Tensor, "..."]:
            return torch.full((size, *shape), value, dtype=torch.int64, device=device)

        attention, *further = (
            AttentionMetadata(
                query_start_loc=torch.arange(size + 1, device=device),
                seq_lens=rows(1),
                block_tables=rows(self._padding_block, self._max_blocks),
                slot_mapping=rows(self._padding_slot),
                max_query_len=1,
                max_seq_len=self._max_model_len,
                num_decodes=size,
                query_start_loc_cpu=list(range(size + 1)),
                seq_lens_cpu=[self._max_model_len] * size,
            )
            for _ in range(num_groups)
        )
        return ForwardBatch(rows(0), rows(0), torch.arange(size, device=device), attention, [], tuple(further))

    def _fill(self, static_inputs: ForwardBatch, batch: ForwardBatch) -> None:
        """Copy a batch into the first rows, and fill the others with padding: single tokens in the padding block."""
        padding = (0, 0, *(1, self._padding_slot, self._padding_block) * (1 + len(batch.further_groups)))
        for static_input, new, value in zip(_inputs(static_inputs), _inputs(batch), padding, strict=True):
            static_input[len(new) :] = value
            static_input[tuple(map(slice, new.shape))] = new


def _inputs(batch: ForwardBatch) -> tuple[Tensor, ...]:
    """Return the tensors that change from step to step."""
    groups = (batch.attention, *batch.further_groups)
    return batch.input_ids, batch.positions, *(x for m in groups for x in (m.seq_lens, m.slot_mapping, m.block_tables))
