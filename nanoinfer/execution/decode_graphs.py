"""Decode steps replayed from CUDA graphs.

In: a ForwardBatch with one new token per sequence. Out: hidden rows. A CUDA graph reads and writes the same memory each time,
so each step's tensors are copied into static input tensors. The number of rows is padded to a captured size. Padding rows read
and write a block of their own, which no sequence ever has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.devices.cuda_graphs import Capture, CapturedGraph, capture_graph, capture_sizes
from nanoinfer.execution.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A captured graph of one number of rows, and the tensors that it reads. graph.out: hidden rows."""

    static_inputs: ForwardBatch
    graph: CapturedGraph


class DecodeGraphs:
    """CUDA graphs of the model's part of a decode step, by number of rows: 1, 2, 4, 8, 16, 32, 48 and so on.

    Args:
        max_num_seqs: The largest number of rows.
        max_model_len: The largest sequence length that a graph supports.
        padding_block: The block of the padding rows.
        capture: Captures a graph. CUDACapture, or a stand-in in tests.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, padding_block: int, capture: Capture) -> None:
        self.sizes = capture_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._max_blocks = -(-max_model_len // block_size)
        self._padding_block = padding_block
        self._padding_slot = padding_block * block_size
        self._capture = capture
        self._buckets: dict[int, _Bucket | None] = {}  # None: could not be captured

    def supports(self, batch: ForwardBatch) -> bool:
        """Whether every sequence of the step has one new token, and their number is at most the largest captured size."""
        return batch.attention.num_decodes == len(batch.input_ids) <= self.sizes[-1]

    def replay(self, batch: ForwardBatch, run: Callable[[ForwardBatch], Tensor]) -> Float[Tensor, "num_tokens hidden"]:
        """The hidden rows of run(batch), by the graph of the smallest sufficient size. The graph is captured on first use."""
        num_rows = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        if size not in self._buckets:
            static_inputs = self._make_static_inputs(size, batch.input_ids.device)
            _fill(static_inputs, batch)
            graph = capture_graph(f"a decode step of {size} rows", lambda: run(static_inputs), self._capture)
            self._buckets[size] = _Bucket(static_inputs, graph) if graph else None
        bucket = self._buckets[size]
        if bucket is None:
            return run(batch)
        self._pad(bucket.static_inputs, num_rows)
        _fill(bucket.static_inputs, batch)
        bucket.graph.replay()
        return bucket.graph.out[:num_rows]

    def _make_static_inputs(self, size: int, device: torch.device) -> ForwardBatch:
        """New tensors with padding rows only."""

        def rows(value: int, *shape: int) -> Int[Tensor, "..."]:
            return torch.full((size, *shape), value, dtype=torch.int64, device=device)

        attention = AttentionMetadata(
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
        return ForwardBatch(rows(0), rows(0), torch.arange(size, device=device), attention, [])

    def _pad(self, static_inputs: ForwardBatch, num_rows: int) -> None:
        """Make padding of the rows from num_rows on: one token each, in the padding block."""
        for static_input, value in (
            (static_inputs.input_ids, 0),
            (static_inputs.positions, 0),
            (static_inputs.attention.slot_mapping, self._padding_slot),
            (static_inputs.attention.seq_lens, 1),
            (static_inputs.attention.block_tables, self._padding_block),
        ):
            static_input[num_rows:] = value


def _fill(static_inputs: ForwardBatch, batch: ForwardBatch) -> None:
    """Copy a batch into the first rows of the static inputs."""
    num_rows, max_blocks = batch.attention.block_tables.shape
    static_inputs.input_ids[:num_rows] = batch.input_ids
    static_inputs.positions[:num_rows] = batch.positions
    static_inputs.attention.slot_mapping[:num_rows] = batch.attention.slot_mapping
    static_inputs.attention.seq_lens[:num_rows] = batch.attention.seq_lens
    static_inputs.attention.block_tables[:num_rows, :max_blocks] = batch.attention.block_tables
