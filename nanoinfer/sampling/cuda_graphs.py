"""The draw replayed from a recording (cuda_graphs.py), for steps that ask for no more than temperature, min_p, top_k and top_p.

In: logits and a SamplingBatch. Out: token ids, the same that the stages and the draw give, or None for a step that asks for
more. A recording launches the same for every step: each row goes both ways, greedy and drawn; what the rows asked for stands in
columns that never move; and a row has the off value of what it did not ask for. Rows do not look at each other, so what stands
in those beyond the batch does not matter.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.devices.cuda_graphs import Capture, CapturedGraph, capture_graph, capture_sizes
from nanoinfer.sampling import fast
from nanoinfer.sampling.batch import SamplingBatch

MAX_TOP_K = 256  # a recording fetches as many of the largest logits; a step with a larger top_k runs as it comes
BYTES_AT_A_TIME = 2**26  # of logits: however many rows there are, a recording needs memory for the work on so many

_COLUMNS: dict[str, tuple[torch.dtype, float]] = {  # of SamplingBatch, with the value that is off
    "greedy": (torch.bool, False),
    "temperature": (torch.float32, 1.0),
    "min_p": (torch.float32, 0.0),
    "top_k": (torch.int64, torch.iinfo(torch.int64).max),
    "top_p": (torch.float64, 1.0),
    "u": (torch.float64, 0.0),
}


class SamplerGraphs:
    """Recordings of the draw, by number of rows and by what is asked for."""

    def __init__(self, max_num_rows: int, capture: Capture) -> None:
        self.sizes = capture_sizes(max_num_rows)
        self._capture = capture
        self._logits = torch.empty(0, 0)  # [max_num_rows, vocab] once there was a step
        self._columns: dict[str, Tensor] = {}  # [max_num_rows] each
        self._recordings: dict[tuple[int, tuple[str, ...]], CapturedGraph | None] = {}  # None: could not be recorded

    def sample(self, logits: Float[Tensor, "batch vocab"], batch: SamplingBatch) -> Int[Tensor, " batch"] | None:
        """-1 for a row whose largest logit is not finite. None: the step asks for more, or could not be recorded."""
        if len(logits) > self.sizes[-1] or batch.max_top_k > MAX_TOP_K or batch.changes_logits or batch.logprobs:
            return None
        size = next(size for size in self.sizes if size >= len(logits))
        names = _columns_read(batch)
        self._fill(logits, batch, names)
        for wanted in (self.sizes[-1], size):  # the largest first: the others find room in its memory
            if (wanted, names) not in self._recordings:
                name = f"the draw of {wanted} tokens"
                self._recordings[wanted, names] = capture_graph(name, partial(self._draw, wanted, names), self._capture)
        if (recording := self._recordings[size, names]) is None:
            return None
        recording.replay()
        return recording.out[: len(logits)].clone()  # it may be read after the next replay

    def _fill(self, logits: Tensor, batch: SamplingBatch, names: tuple[str, ...]) -> None:
        """Copy a step into the first rows of the places, which its first call makes."""
        if not self._columns:
            self._logits = logits.new_zeros(self.sizes[-1], logits.shape[-1])
            for name, (dtype, off) in _COLUMNS.items():
                self._columns[name] = torch.full((self.sizes[-1],), off, dtype=dtype, device=logits.device)
        self._logits[: len(logits)] = logits
        for name in names:
            column = getattr(batch, name)
            self._columns[name][: len(logits)] = _COLUMNS[name][1] if column is None else column

    def _draw(self, size: int, names: tuple[str, ...]) -> Int[Tensor, " size"]:
        """What is recorded: the tokens of the first rows of the places, some rows at a time."""
        num_at_a_time = max(BYTES_AT_A_TIME // self._logits[0].nbytes, 1)
        token_ids = []
        for start in range(0, size, num_at_a_time):
            rows = slice(start, min(start + num_at_a_time, size))
            columns: dict[str, Any] = {name: self._columns[name][rows] if name in names else None for name in _COLUMNS}
            max_top_k = min(MAX_TOP_K, self._logits.shape[-1])
            asked = SamplingBatch(all_greedy="greedy" not in names, max_top_k=max_top_k, **columns)
            token_ids.append(fast.sample_both_ways(self._logits[rows], asked))
        return torch.cat(token_ids)


def _columns_read(batch: SamplingBatch) -> tuple[str, ...]:
    """u alone if all rows are greedy. Else all, save a top_k or top_p that no row has: those go over all logits many times."""
    if batch.all_greedy:
        return ("u",)
    return tuple(name for name in _COLUMNS if name not in ("top_k", "top_p") or getattr(batch, name) is not None)
