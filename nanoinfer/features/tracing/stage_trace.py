"""Trace events of the sampler: what each stage did to each row (StageApplied), and the draw (TokenDrawn)."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.features.tracing.events import Candidate, Interval, StageApplied, TokenDrawn
from nanoinfer.features.tracing.observer import TracingObserver
from nanoinfer.sampling.batch import SamplingBatch, sampled_positions
from nanoinfer.sampling.draw import integer_weights
from nanoinfer.sampling.sampler import SampledTokens, Sampler
from nanoinfer.sampling.stages import Logits, Stage, stage_name

NUM_CANDIDATES = 10  # the most probable ids before a stage, and as many after it, besides the sampled token


@dataclass(frozen=True, slots=True)
class _StageChange:
    """The probabilities before and after a stage."""

    stage: str
    rows: list[int]  # the changed rows
    num_left: list[int]  # for every row, the number of ids with a finite logit
    entropy: list[float]  # for every row, in bits, after the stage
    before: Float[Tensor, "batch vocab"]
    after: Float[Tensor, "batch vocab"]


class TracingSampler(Sampler):
    """Does what a sampler does, stage by stage for every row, and emits the events of a step after its draw.

    Every event includes the sampled token, so until the draw it keeps all rows' probabilities after every stage that changed a
    row, in the host's memory. `seconds` is the time spent on tracing a step.
    """

    def __init__(self, sampler: Sampler, observer: TracingObserver) -> None:
        super().__init__(sampler.stages)
        self._observer, self.may_be_late = observer, False  # it reads the plan that is launched

    def sample_by_stages(self, logits: Logits, batch: SamplingBatch) -> SampledTokens:
        self.begin()
        sampled = super().sample_by_stages(logits, batch)
        greedy = set(batch.row_groups.greedy_rows)
        self.after_draw([None if row in greedy else u for row, u in enumerate(batch.u.tolist())], sampled.token_ids)
        self._observer.stage_seconds[id(self._observer.launched)] = self.seconds
        return sampled

    def apply(self, stages: tuple[Stage, ...], logits: Logits, batch: SamplingBatch) -> Logits:
        self.after_stage("model", logits)
        for stage in stages:
            logits = super().apply((stage,), logits, batch)
            self.after_stage(stage_name(stage), logits)
        return logits

    def begin(self) -> None:
        """Forget the last step, and note each row's sequence and the position of its new token."""
        sequences = [seq for seq, _ in self._observer.launched.rows]
        self._rows = [(seq.sequence_id, at) for seq, at in zip(sequences, sampled_positions(sequences), strict=True)]
        self.seconds = 0.0
        self._last: Tensor  # the logits after the last stage
        self._logits: Tensor | None = None  # a copy of those that a stage changed last
        self._changes: list[_StageChange] = []

    def after_stage(self, stage: str, logits: Float[Tensor, "batch vocab"]) -> None:
        """Note what a stage changed. The first call has the stage "model" and the model's own logits."""
        with self._measure(logits):
            self._last, logits = logits, logits.cpu()
            rows = list(range(len(logits)))
            if self._logits is not None:
                rows = (logits != self._logits).any(dim=-1).nonzero().flatten().tolist()
            if rows:
                after = logits.softmax(dim=-1).nan_to_num_(0.0)  # NaN if a row has no finite logit
                before = self._changes[-1].after if self._changes else after
                num_left = (logits > float("-inf")).sum(dim=-1).tolist()
                entropy = (torch.special.entr(after).sum(dim=-1) / math.log(2)).tolist()
                self._changes.append(_StageChange(stage, rows, num_left, entropy, before, after))
                self._logits = logits.clone() if logits is self._last else logits

    def after_draw(self, u: list[float | None], token_ids: Int[Tensor, " batch"]) -> None:
        """Emit the events. u: the uniform number of each row. None: a greedy row. token_ids: -1 if a row has no token."""
        with self._measure(token_ids):
            sampled = token_ids.tolist()
            for change in self._changes:
                for row in change.rows:
                    candidates = self._candidates(change.before[row], change.after[row], sampled[row])
                    num_left, entropy = change.num_left[row], change.entropy[row]
                    self._observer.emit(StageApplied(*self._rows[row], change.stage, num_left, entropy, candidates))
            for row, token_id in enumerate(sampled):
                if token_id >= 0:
                    weights = integer_weights(self._last[row : row + 1])[0]  # on the device, whose bits decided
                    self._observer.emit(self._draw(row, token_id, u[row], weights, weights.cumsum(dim=-1)))

    @contextmanager
    def _measure(self, tensor: Tensor) -> Iterator[None]:
        """Add the time of the block to `seconds`, without the time that the GPU takes to finish earlier work."""
        torch.get_device_module(tensor.device).synchronize(tensor.device)
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def _draw(
        self, row: int, token_id: int, u: float | None, weights: Int[Tensor, " vocab"], cumulative: Int[Tensor, " vocab"]
    ) -> TokenDrawn:
        total, num_left = int(cumulative[-1]), int((weights > 0).sum())
        widest = weights.topk(min(2 * NUM_CANDIDATES, num_left)).indices.tolist()
        intervals = {}
        for i in sorted({*widest, token_id}):
            end, width = int(cumulative[i]), int(weights[i])
            intervals[i] = Interval(i, self._observer.text(i), (end - width) / total, end / total)
        own = intervals[token_id]
        return TokenDrawn(*self._rows[row], token_id, own.token, u, own.low, own.high, tuple(intervals.values()))

    def _candidates(
        self, before: Float[Tensor, " vocab"], after: Float[Tensor, " vocab"], chosen: int
    ) -> tuple[Candidate, ...]:
        leading = [probs.topk(min(NUM_CANDIDATES, len(probs))) for probs in (before, after)]
        ids = torch.cat([top.indices[top.values > 0] for top in leading]).unique().tolist()
        ids = sorted({*ids, chosen} - {-1}, key=lambda i: (-float(before[i]), i))
        return tuple(Candidate(i, self._observer.text(i), float(before[i]), float(after[i])) for i in ids)
