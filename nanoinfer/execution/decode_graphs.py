"""Decode steps replayed from CUDA graphs.

A CUDA graph reads and writes the same memory each time, so each step's tensors are copied into tensors that never move, and
padding rows read and write a block of their own, which no sequence ever has.
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
    """The places that a recording reads, and the recording, which fills hidden rows."""

    places: ForwardBatch
    recording: CapturedGraph


class DecodeGraphs:
    """Recordings of the model's part of decode steps, by their number of rows: 1, 2, 4, 8, 16, 32, 48 and so on.

    padding_block: the block of the padding rows. max_model_len: a recording must serve sequences of every length up to it.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, padding_block: int, capture: Capture) -> None:
        self.sizes = capture_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._max_blocks = -(-max_model_len // block_size)
        self._padding_block = padding_block
        self._padding_slot = padding_block * block_size
        self._capture = capture
        self._buckets: dict[int, _Bucket | None] = {}  # None: could not be recorded

    def covers(self, batch: ForwardBatch) -> bool:
        """Steps of single tokens alone."""
        return batch.attention.num_decodes == len(batch.input_ids) <= self.sizes[-1]

    def replay(self, batch: ForwardBatch, run: Callable[[ForwardBatch], Tensor]) -> Float[Tensor, "num_tokens hidden"]:
        """The hidden rows of run(batch), by the recording of the smallest bucket that holds it."""
        num_rows = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        if size not in self._buckets:
            places = self._places(size, batch.input_ids.device)
            _fill(places, batch)
            recording = capture_graph(f"a decode step of {size} rows", lambda: run(places), self._capture)
            self._buckets[size] = _Bucket(places, recording) if recording else None
        bucket = self._buckets[size]
        if bucket is None:
            return run(batch)
        self._pad(bucket.places, num_rows)
        _fill(bucket.places, batch)
        bucket.recording.replay()
        return bucket.recording.out[:num_rows]

    def _places(self, size: int, device: torch.device) -> ForwardBatch:
        """Tensors that never move, of padding rows alone."""

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

    def _pad(self, places: ForwardBatch, num_rows: int) -> None:
        """The rows from num_rows on: one token each, in the padding block."""
        for place, value in (
            (places.input_ids, 0),
            (places.positions, 0),
            (places.attention.slot_mapping, self._padding_slot),
            (places.attention.seq_lens, 1),
            (places.attention.block_tables, self._padding_block),
        ):
            place[num_rows:] = value


def _fill(places: ForwardBatch, batch: ForwardBatch) -> None:
    """Copy a batch into the first rows."""
    num_rows, max_blocks = batch.attention.block_tables.shape
    places.input_ids[:num_rows] = batch.input_ids
    places.positions[:num_rows] = batch.positions
    places.attention.slot_mapping[:num_rows] = batch.attention.slot_mapping
    places.attention.seq_lens[:num_rows] = batch.attention.seq_lens
    places.attention.block_tables[:num_rows, :max_blocks] = batch.attention.block_tables
