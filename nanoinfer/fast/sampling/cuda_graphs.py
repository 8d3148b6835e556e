"""CUDA graphs of the LM head and the draw, for steps that use no parameters but temperature, min_p, top_k and top_p.

In: HeadRows and a SamplingBatch. Out: the token ids that the stages and the draw give, or None for an unsupported step. A graph
launches the same kernels in every step, so each row is computed both greedily and by the draw. The hidden rows and the
parameters are copied into static inputs, with the off value for a parameter that a row does not use. Rows are independent, so
the content of the rows beyond the batch does not matter.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.fast.cuda.graphs import Capture, CapturedGraphs, capture_sizes
from nanoinfer.fast.sampling.few_logits import sample_on_gpu
from nanoinfer.sampling.batch import ParameterColumns, SamplingBatch
from nanoinfer.sampling.routes import Route
from nanoinfer.sampling.sampler import HeadRows

INPUTS: dict[str, tuple[torch.dtype, float]] = {  # field of SamplingBatch: dtype, and the value that is off
    "greedy": (torch.bool, False),
    "temperature": (torch.float32, 1.0),
    "min_p": (torch.float32, 0.0),
    "top_k": (torch.int64, torch.iinfo(torch.int64).max),
    "top_p": (torch.float64, 1.0),
    "u": (torch.float64, 0.0),
}
_ALWAYS = "greedy", "temperature", "u"
PREPARED = (), _ALWAYS, (*_ALWAYS, "top_k"), (*_ALWAYS, "top_p"), (*_ALWAYS, "top_k", "top_p")  # the inputs of most requests

Draw = tuple[int, tuple[str, ...]]  # the padded number of rows, and the inputs that are read, as inputs_read returns them


class SamplerGraphs(Route):
    """Captured graphs of the LM head and the draw. on_first_use: as in CapturedGraphs."""

    def __init__(self, max_num_rows: int, capture: Capture, *, on_first_use: bool = True) -> None:
        self.sizes = capture_sizes(max_num_rows)
        self._head: Callable[[Tensor], Tensor] | None = None  # the one LM head that the graphs compute
        self._hidden = torch.empty(0, 0)  # [max_num_rows, hidden] from the first step on
        self._columns: dict[str, Tensor] = {}  # name in INPUTS -> static input [max_num_rows]
        self._filled: Mapping[str, Any] | None = None  # SamplingBatch.of_params of what the columns hold in their first rows
        name = "the draw of {0[0]} tokens".format
        self.table = CapturedGraphs[Draw](capture, self._draw, name, itemgetter(0), on_first_use)

    def prepare(self, rows: HeadRows) -> None:
        """Capture the draws of most requests."""
        self._allocate(rows)
        self.table.capture_all((size, names) for size in self.sizes for names in PREPARED)

    def capture_next(self) -> bool:
        return self.table.capture_next()

    def drop_graphs(self) -> None:
        self.table.drop()

    def try_sample(self, rows: HeadRows, batch: SamplingBatch) -> Int[Tensor, " batch"] | None:
        """Replay the graph of the step. Returns None also if it is not captured."""
        num_rows = len(rows.hidden)
        if not rows.is_raw or num_rows > self.sizes[-1]:
            return None
        self._allocate(rows)
        if rows.head != self._head:
            return None
        names = inputs_read(batch)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        if (graph := self.table.find((size, names), (self.sizes[-1], names))) is None:
            return None
        self._fill(rows.hidden, batch, names)
        graph.replay()
        return graph.out[:num_rows].clone()  # a copy, because it may be read after the next replay

    def reserved_bytes(self, logits_bytes: int) -> int:
        """Return the bytes of the logits that a graph computes."""
        return logits_bytes

    def _allocate(self, rows: HeadRows) -> None:
        """Make the static inputs, in the first call."""
        if self._head is None:
            self._head, hidden = rows.head, rows.hidden
            self._hidden = hidden.new_zeros(self.sizes[-1], hidden.shape[-1])
            shape, device = (self.sizes[-1],), hidden.device
            self._columns = {name: torch.full(shape, off, dtype=dtype, device=device) for name, (dtype, off) in INPUTS.items()}

    def _fill(self, hidden: Tensor, batch: SamplingBatch, names: tuple[str, ...]) -> None:
        """Copy a step into the first rows of the static inputs."""
        self._hidden[: len(hidden)] = hidden
        if "u" in names:
            self._columns["u"][: len(hidden)] = batch.u
        if names and self._filled is not batch.of_params:
            self._filled = batch.of_params
            for name in INPUTS.keys() - {"u"}:
                column, (_, off) = getattr(batch, name), INPUTS[name]
                self._columns[name][: len(hidden)] = off if column is None else column

    def _draw(self, draw: Draw) -> Int[Tensor, " size"]:
        """Draw the tokens of the first rows of the static inputs. This is what a graph captures."""
        assert self._head is not None
        size, names = draw
        inputs: dict[str, Any] = {name: self._columns[name][:size] for name in names}
        u = inputs.pop("u", None)  # a greedy draw does not read it
        logits = self._head(self._hidden[:size])  # kernels read bf16 in half the time
        return sample_on_gpu(logits, ParameterColumns(**inputs), u)


def inputs_read(batch: SamplingBatch) -> tuple[str, ...]:
    """Return () if all rows are greedy. Otherwise all inputs, but min_p, top_k and top_p only if used, since they take time."""
    if batch.row_groups.all_greedy:
        return ()
    return (*_ALWAYS, *(name for name in ("min_p", "top_k", "top_p") if getattr(batch, name) is not None))
