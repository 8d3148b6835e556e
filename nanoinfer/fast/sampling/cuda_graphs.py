"""CUDA graphs of the draw, for steps that use no parameters but temperature, min_p, top_k and top_p.

In: HeadRows and a SamplingBatch. Out: the token ids that the stages and the draw give, or None for an unsupported step. A graph
launches the same kernels in every step, so each row is computed both greedily and by the draw. The parameters are copied into
static inputs, with the off value for a parameter that a row does not use. Rows are independent, so the content of the rows
beyond the batch does not matter.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.fast.cuda.graphs import Capture, CapturedGraph, capture_graph, capture_sizes
from nanoinfer.fast.sampling.few_logits import sample_on_gpu
from nanoinfer.sampling.batch import ParameterColumns, SamplingBatch
from nanoinfer.sampling.routes import HeadRows, Route

MAX_TOP_K = 256  # the number of largest logits that a graph fetches. A larger top_k runs without a graph

_INPUTS: dict[str, tuple[torch.dtype, float]] = {  # name in ParameterColumns, or "u": dtype, and the value that is off
    "greedy": (torch.bool, False),
    "temperature": (torch.float32, 1.0),
    "min_p": (torch.float32, 0.0),
    "top_k": (torch.int64, torch.iinfo(torch.int64).max),
    "top_p": (torch.float64, 1.0),
    "u": (torch.float64, 0.0),
}


class SamplerGraphs(Route):
    """Captured graphs of the draw, by the number of rows and the inputs that are read."""

    def __init__(self, max_num_rows: int, capture: Capture) -> None:
        self.sizes = capture_sizes(max_num_rows)
        self._capture = capture
        self._logits = torch.empty(0, 0)  # [max_num_rows, vocab] from the first step on
        self._columns: dict[str, Tensor] = {}  # name in _INPUTS -> static input [max_num_rows]
        self._filled: ParameterColumns | None = None  # what the columns hold in their first rows
        self._graphs: dict[tuple[int, tuple[str, ...]], CapturedGraph | None] = {}  # None: the capture failed

    def try_sample(self, rows: HeadRows, batch: SamplingBatch) -> Int[Tensor, " batch"] | None:
        """Replay the graph of the step, captured on first use. Returns None also if the capture failed."""
        if not rows.is_raw or len(rows.hidden) > self.sizes[-1] or batch.columns.max_top_k > MAX_TOP_K:
            return None
        logits = rows.head(rows.hidden)  # kernels read bf16 in half the time
        size = next(size for size in self.sizes if size >= len(logits))
        names = _inputs_read(batch)
        self._fill(logits, batch, names)
        for needed in (self.sizes[-1], size):  # the largest first, so that smaller graphs reuse its memory
            if (needed, names) not in self._graphs:
                name = f"the draw of {needed} tokens"
                self._graphs[needed, names] = capture_graph(name, partial(self._draw, needed, names), self._capture)
        if (graph := self._graphs[size, names]) is None:
            return None
        graph.replay()
        return graph.out[: len(logits)].clone()  # a copy, because it may be read after the next replay

    def reserved_bytes(self, logits_bytes: int) -> int:
        """Return the bytes of the static logits."""
        return logits_bytes

    def _fill(self, logits: Tensor, batch: SamplingBatch, names: tuple[str, ...]) -> None:
        """Copy a step into the first rows of the static inputs, which are allocated by the first call."""
        if not self._columns:
            self._logits = logits.new_zeros(self.sizes[-1], logits.shape[-1])
            for name, (dtype, off) in _INPUTS.items():
                self._columns[name] = torch.full((self.sizes[-1],), off, dtype=dtype, device=logits.device)
        self._logits[: len(logits)] = logits
        if "u" in names:
            self._columns["u"][: len(logits)] = batch.u
        if names and self._filled is not batch.columns:
            self._filled = batch.columns
            for name in _INPUTS.keys() - {"u"}:
                column, (_, off) = getattr(batch.columns, name), _INPUTS[name]
                self._columns[name][: len(logits)] = off if column is None else column

    def _draw(self, size: int, names: tuple[str, ...]) -> Int[Tensor, " size"]:
        """Draw the tokens of the first rows of the static inputs. This is what a graph captures."""
        inputs: dict[str, Any] = {name: self._columns[name][:size] for name in names}
        u = inputs.pop("u", None)
        max_top_k = min(MAX_TOP_K, self._logits.shape[-1])
        return sample_on_gpu(self._logits[:size], ParameterColumns(max_top_k=max_top_k, **inputs), u)


def _inputs_read(batch: SamplingBatch) -> tuple[str, ...]:
    """Return () if all rows are greedy. Otherwise all inputs, but min_p, top_k and top_p only if used, since they take time."""
    if batch.row_groups.all_greedy:
        return ()
    always = "greedy", "temperature", "u"
    return tuple(name for name in _INPUTS if name in always or getattr(batch.columns, name) is not None)
