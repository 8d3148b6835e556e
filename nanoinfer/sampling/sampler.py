"""Choose a token id per row, from hidden rows to logits, through every stage of STAGES in order, to the draw.

In: HeadRows and a SamplingBatch. Out: SampledTokens, and from these a SamplerOutput. The sampler knows no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.outputs import TokenReport
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import argmax, draw
from nanoinfer.sampling.stages import STAGES as STAGES  # users import it from here
from nanoinfer.sampling.stages import STAGES_FROM_TEMPERATURE, Logits, Stage, apply_logits_processors, stage_name
from nanoinfer.system.transfer import HostCopy

PART_BYTES = 2**22  # the logits of which a stage from the temperature on, or the draw, computes new ones at a time
NOT_FINITE = "the model's logits are not finite; check the checkpoint, or try dtype='float32'"


class HeadRows:
    """The hidden rows of a step that choose a token, with the LM head. The logits are computed when they are first read."""

    def __init__(self, hidden: Float[Tensor, "num_rows hidden"], head: Callable[[Tensor], Tensor]) -> None:
        """head: maps `hidden`, the output of the model's last layer, to logits in the model's dtype."""
        self.hidden, self.head = hidden, head
        self._logits: Tensor | None = None

    @property
    def is_raw(self) -> bool:
        """Whether only the choice needs the logits. False once they were read: stages may have changed them."""
        return self._logits is None

    @property
    def logits(self) -> Float[Tensor, "num_rows vocab"]:
        """The logits in fp32, which the stages before the temperature change in place."""
        if self._logits is None:
            self._logits = self.head(self.hidden).float().contiguous()  # copies expanded logits, which cannot be written
        return self._logits


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens of one step.

    token_ids[i] is row i's token, or -1 if row i has none: errors[i] then says why. reports[i]: what the request of row i asked
    for, if the row has a token.
    """

    token_ids: list[int]
    errors: dict[int, str]
    reports: dict[int, TokenReport] = field(default_factory=dict)


class SampledTokens:
    """The tokens of one step, still on their device, which goes on with other work. read() waits for the tokens.

    Attributes:
        logits: what the stages have left. None: no stage ran, since a route chose among the model's own logits.
        must_sync: whether the host must have the tokens before it can prepare the next step.
        report: makes the reports of rows, given the token ids. What it reads of the device was copied when it was made.
    """

    def __init__(
        self, token_ids: Int[Tensor, " batch"], logits: Logits | None, must_sync: bool, explain: Callable[[int], str]
    ) -> None:
        """Start copying the ids to the host. explain: says why a row, whose id is -1, has no token."""
        self.token_ids, self.logits, self.must_sync, self._explain = token_ids, logits, must_sync, explain
        self.report: Callable[[list[int]], dict[int, TokenReport]] = lambda token_ids: {}
        self._on_host = HostCopy(token_ids)

    def read(self) -> SamplerOutput:
        token_ids: list[int] = self._on_host.read()[0].tolist()
        errors = {row: self._explain(row) for row, token_id in enumerate(token_ids) if token_id < 0}
        return SamplerOutput(token_ids, errors, self.report(token_ids))


class LateTokens:
    """The tokens of a step whose constraints read the tokens of the step before, chosen when they are first needed.

    Until then the device computes the forward pass, and the host reads the tokens of the step before.
    """

    def __init__(self, sample: Callable[[], SampledTokens], must_sync: bool) -> None:
        """sample: launches the choice. It is called once. must_sync: as that of SampledTokens."""
        self.sample, self.must_sync = cache(sample), must_sync

    @property
    def token_ids(self) -> Int[Tensor, " batch"]:
        return self.sample().token_ids

    def read(self) -> SamplerOutput:
        return self.sample().read()


class Sampler:
    """Chooses the tokens of a step, stage by stage: the definition that the routes (routes.py) must reproduce.

    Greedy rows pass through the stages like all other rows, and take the argmax at the end, the lowest id of equal maxima.
    """

    def __init__(self, stages: tuple[Stage, ...] = STAGES) -> None:
        """stages: in their order. features/own_code adds those of users to STAGES."""
        self.stages = stages
        self.has_user_stages = stages != STAGES
        self.may_be_late = not self.has_user_stages  # whether it may be called after later steps were planned (LateTokens)

    def __call__(self, rows: HeadRows, batch: SamplingBatch) -> SampledTokens:
        """Choose a token per row. The stages may write into the logits of the rows."""
        if not len(rows.hidden):  # the step has only parts of prompts. A user's stage need not handle zero rows
            return self.sampled(torch.empty(0, dtype=torch.int64), batch, None, None)
        return self.sample_by_stages(rows.logits, batch)

    def sample_by_stages(self, logits: Logits, batch: SamplingBatch) -> SampledTokens:
        """Run every stage on every row, then choose."""
        is_finite = logits.amax(dim=-1).isfinite()  # before a mask could hide it
        logits = self.apply(self.stages, logits, batch)
        return self.sampled(torch.where(is_finite, choose(logits, batch), -1), batch, logits, is_finite)

    def apply(self, stages: tuple[Stage, ...], logits: Logits, batch: SamplingBatch) -> Logits:
        for stage in stages:
            logits = apply_stage(stage, logits, batch)
        return logits

    def sampled(
        self,
        token_ids: Int[Tensor, " batch"],
        batch: SamplingBatch,
        logits: Logits | None,
        is_finite: Bool[Tensor, " batch"] | None,
    ) -> SampledTokens:
        """Pack the tokens, -1 if a row has none.

        logits: the logits that stages may have changed. None: no stage ran, so -1 means that the model's logits are not finite.
        is_finite: whether the model's logits were finite, before a mask could hide it. None: no stage masks.
        """

        def explain(row: int) -> str:
            if logits is None or (is_finite is not None and not is_finite[row]):
                return NOT_FINITE
            return self._explain_empty_row(torch.zeros_like(logits), batch, row)

        must_sync = self.has_user_stages or bool(batch.with_processors) or (not self.may_be_late and batch.reads_tokens)
        return SampledTokens(token_ids, logits, must_sync, explain)

    def _explain_empty_row(self, blank: Logits, batch: SamplingBatch, row: int) -> str:
        """Name the stage that removed a row's last token: run the stages again on zeros, and check after each.

        Users' functions are not run again, since they may count their calls. They are named if no stage removed the token.
        """
        for constraint in batch.sequences[row].constraints:
            if constraint.error:
                return constraint.error
        users = [stage for stage in self.stages if stage not in STAGES]
        if row in batch.with_processors:
            users.append(apply_logits_processors)
        for stage in STAGES:
            if stage is not apply_logits_processors:
                blank = apply_stage(stage, blank, batch)
            if not blank[row].amax().isfinite():
                return f"no token is left to draw after {stage_name(stage)}; loosen the parameters that it reads"
        if users:
            names = " and ".join(stage_name(stage) for stage in users)
            return f"no token is left to draw after {names}; leave one logit finite, and make none infinite or NaN"
        return NOT_FINITE


def choose(logits: Logits, batch: SamplingBatch) -> Int[Tensor, " batch"]:
    """Take the argmax of greedy rows and draw the others. The id is -1 if the largest logit is not finite."""
    token_ids = argmax(logits)
    if batch.row_groups.all_greedy:
        return token_ids
    is_chosen = token_ids < 0 if batch.greedy is None else batch.greedy | (token_ids < 0)
    return torch.where(is_chosen, token_ids, in_parts(lambda logits, batch: draw(logits, batch.u), logits, batch))


def apply_stage(stage: Stage, logits: Logits, batch: SamplingBatch) -> Logits:
    return in_parts(stage, logits, batch) if stage in STAGES_FROM_TEMPERATURE else stage(logits, batch)


def in_parts(function: Stage, logits: Logits, batch: SamplingBatch) -> Tensor:
    """Compute function(logits, batch), some rows at a time, because weights and sorted logits take many times their memory.

    function: computes each row for itself, from the columns of SamplingBatch.only_rows.
    """
    num_rows = max(PART_BYTES // (logits.shape[-1] * logits.itemsize), 1)
    if num_rows >= len(logits):
        return function(logits, batch)
    first, *others = (slice(start, start + num_rows) for start in range(0, len(logits), num_rows))
    part = function(logits[first], batch.only_rows(first))
    out = part.new_empty(len(logits), *part.shape[1:])
    out[first] = part
    for rows in others:
        out[rows] = function(logits[rows], batch.only_rows(rows))
    return out
