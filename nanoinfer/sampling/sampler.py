"""Choose a token id per row, from hidden rows to logits, through every stage of STAGES in order, to the draw.

In: HeadRows and a SamplingBatch. Out: SampledTokens, and from these a SamplerOutput. The sampler knows no tokenizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.outputs import TokenLogprobs
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import argmax, draw
from nanoinfer.sampling.logprobs import token_logprobs
from nanoinfer.sampling.routes import HeadRows, Route
from nanoinfer.sampling.stages import Logits
from nanoinfer.system.transfer import on_device

Stage = Callable[[Tensor, SamplingBatch], Tensor]

STAGES: tuple[Stage, ...] = (
    stages.keep_allowed,
    stages.keep_grammatical,
    stages.end_thinking,
    stages.mask_bad_words,
    stages.mask_min_tokens,
    stages.add_logit_bias,
    stages.apply_repetition_penalty,
    stages.apply_frequency_penalty,
    stages.apply_presence_penalty,
    stages.mask_repeated_ngrams,
    stages.apply_logits_processors,
    stages.apply_temperature,
    stages.keep_min_p,
    stages.keep_top_k,
    stages.keep_top_p,
)
STAGES_BEFORE_TEMPERATURE = STAGES[: STAGES.index(stages.apply_temperature)]  # they change few logits, in place
STAGES_FROM_TEMPERATURE = STAGES[STAGES.index(stages.apply_temperature) :]  # what a route computes, with the draw

NOT_FINITE = "the model's logits are not finite; check the checkpoint, or try dtype='float32'"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens of one step.

    token_ids[i] is row i's token, or -1 if row i has none: errors[i] then says why. logprobs[i] holds the log-probabilities of
    row i, if requested and if the row has a token. masks[i] holds the ids that the stages have left in row i, if requested.
    """

    token_ids: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    masks: dict[int, list[int]] = field(default_factory=dict)


class SampledTokens:
    """The tokens of one step, still on their device, which goes on with other work. read() waits for the tokens."""

    def __init__(self, token_ids: Int[Tensor, " batch"], read: Callable[[list[int]], SamplerOutput]) -> None:
        """Start copying the ids to the host, where `read` turns them into the SamplerOutput. -1: a row has no token."""
        self.token_ids = token_ids
        self._read = read
        self._on_host, self._is_there = token_ids, None
        if token_ids.device.type != "cpu":  # the copy is queued after the choice, and before the next work of the device
            self._on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._on_host.copy_(token_ids, non_blocking=True)
            self._is_there = torch.get_device_module(token_ids.device).Event()
            self._is_there.record()

    def read(self) -> SamplerOutput:
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._read(self._on_host.tolist())


class Sampler:
    """Chooses the tokens of a step: by the first route that supports it, or stage by stage, with the same result.

    Greedy rows pass through the stages like all other rows, and take the argmax at the end, the lowest id of equal maxima.
    """

    def __init__(self, stages: tuple[Stage, ...] = STAGES, *, routes: Sequence[Route] = (), logprobs_mode: str = "raw") -> None:
        """Check and keep the stages.

        Args:
            stages: the stages in their order. `[*STAGES, mine]` adds a stage, (logits [batch, vocab], SamplingBatch) -> logits.
                With stages other than STAGES, every row runs stage by stage.
            routes: faster ways to the same tokens, in the order in which they are tried.
            logprobs_mode: which log-probabilities are returned, or which logits instead, as EngineArgs says.

        Raises:
            InvalidValueError: a stage of STAGES is missing.
        """
        if missing := [stage_name(stage) for stage in STAGES if stage not in stages]:
            raise InvalidValueError(
                f"stages lacks {', '.join(missing)}, so parameters would be ignored; use [*STAGES, mine], STAGES being in "
                "nanoinfer.sampling.sampler"
            )
        self.stages = stages
        self.routes = tuple(routes)
        self.processed_logprobs = logprobs_mode.startswith("processed")
        self.returns_logits = logprobs_mode.endswith("_logits")
        self.has_user_stages = stages != STAGES

    def __call__(self, rows: HeadRows, batch: SamplingBatch) -> SampledTokens:
        """Choose a token per row. The stages may write into the logits of the rows."""
        if not len(rows.hidden):  # the step has only parts of prompts. A user's stage need not handle zero rows
            return SampledTokens(torch.empty(0, dtype=torch.int64), lambda _: SamplerOutput([], {}))
        reads_every_stage = batch.row_groups.masks or (self.processed_logprobs and batch.row_groups.logprobs)
        if self.routes and not reads_every_stage and not self.has_user_stages:
            return self._sample_by_route(rows, batch)
        return self._sample_by_stages(rows.logits, batch)

    def _sample_by_stages(self, logits: Logits, batch: SamplingBatch) -> SampledTokens:
        """Run every stage on every row, then choose: the definition that the routes must reproduce."""
        logprob_logits = _rows_with_logprobs(logits, batch)
        is_finite = logits.amax(dim=-1).isfinite()
        logits = self._apply(self.stages, logits, batch)
        token_ids = torch.where(is_finite, _choose(logits, batch), -1)
        if self.processed_logprobs:
            logprob_logits = _rows_with_logprobs(logits, batch)
        return self._sampled(token_ids, batch, logits, is_finite, logprob_logits)

    def _sample_by_route(self, rows: HeadRows, batch: SamplingBatch) -> SampledTokens:
        """Run the stages before the temperature if they may change a logit, then the first route that supports the step."""
        logits = is_finite = logprob_logits = None
        if batch.changes_logits or batch.row_groups.logprobs:
            logprob_logits = _rows_with_logprobs(rows.logits, batch)
            is_finite = rows.logits.amax(dim=-1).isfinite() if batch.masks_logits else None
            logits = self._apply(STAGES_BEFORE_TEMPERATURE, rows.logits, batch)
            rows = HeadRows(rows.hidden, rows.head, logits)
        for route in self.routes:
            if (token_ids := route.try_sample(rows, batch)) is not None:
                break
        else:
            token_ids = _choose(self._apply(STAGES_FROM_TEMPERATURE, rows.logits, batch), batch)
        if is_finite is not None:
            token_ids = torch.where(is_finite, token_ids, -1)
        return self._sampled(token_ids, batch, logits, is_finite, logprob_logits)

    def _apply(self, stages: tuple[Stage, ...], logits: Logits, batch: SamplingBatch) -> Logits:
        for stage in stages:
            processed = stage(logits, batch)
            if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                name = stage_name(stage)
                raise InvalidTypeError(f"stage {name} must return logits of shape {tuple(logits.shape)}, got {got}")
            logits = processed.contiguous()
        return logits

    def _sampled(
        self,
        token_ids: Int[Tensor, " batch"],
        batch: SamplingBatch,
        logits: Logits | None,
        is_finite: Bool[Tensor, " batch"] | None,
        logprob_logits: Float[Tensor, "rows vocab"] | None,
    ) -> SampledTokens:
        """Pack the tokens, -1 if a row has none, with a function that reads them.

        logits: the logits that stages may have changed. None: no stage ran, so -1 means that the model's logits are not finite.
        is_finite: whether the model's logits were finite, before a mask could hide it. None: no stage masks.
        """

        def read(sampled: list[int]) -> SamplerOutput:
            errors = {
                row: NOT_FINITE
                if logits is None or not (is_finite is None or is_finite[row])
                else self._explain_empty_row(logits, batch, row)
                for row, token_id in enumerate(sampled)
                if token_id < 0
            }
            logprobs = {} if logprob_logits is None else self._logprobs(logprob_logits, batch, sampled)
            masks = {}
            if logits is not None:  # always the case if a row asks for its mask
                masks = {row: logits[row].isfinite().nonzero().squeeze(-1).tolist() for row in batch.row_groups.masks}
            return SamplerOutput(sampled, errors, logprobs, masks)

        return SampledTokens(token_ids, read)

    def _logprobs(
        self, logits: Float[Tensor, "rows vocab"], batch: SamplingBatch, token_ids: list[int]
    ) -> dict[int, TokenLogprobs]:
        """Log-probabilities by row. logits: of the rows that return them. A row without a token gets none."""
        if not batch.row_groups.logprobs:
            return {}
        rows, nums = zip(*batch.row_groups.logprobs, strict=True)
        drawn = [max(token_ids[row], 0) for row in rows]
        given = [batch.params[row].logprob_token_ids or () for row in rows]
        entries = token_logprobs(logits, drawn, list(nums), given, as_logits=self.returns_logits)
        return {row: entry for row, entry in zip(rows, entries, strict=True) if token_ids[row] >= 0}

    def _explain_empty_row(self, logits: Logits, batch: SamplingBatch, row: int) -> str:
        """Name the stage that removed a row's last token: run the stages again on zeros, and check after each.

        Users' functions are not run again, since they may count their calls. They are named if no stage removed the token.
        """
        for constraint in batch.sequences[row].constraints:
            if constraint.error:
                return constraint.error
        users = [stage for stage in self.stages if stage not in STAGES]
        if row in batch.with_processors:
            users.append(stages.apply_logits_processors)
        blank = torch.zeros_like(logits)
        for stage in STAGES:
            if stage is not stages.apply_logits_processors:
                blank = stage(blank, batch)
            if not blank[row].amax().isfinite():
                return f"no token is left to draw after {stage_name(stage)}; loosen the parameters that it reads"
        if users:
            names = " and ".join(stage_name(stage) for stage in users)
            return f"no token is left to draw after {names}; leave one logit finite, and make none infinite or NaN"
        return NOT_FINITE


def _choose(logits: Logits, batch: SamplingBatch) -> Int[Tensor, " batch"]:
    """Take the argmax of greedy rows and draw the others. The id is -1 if the largest logit is not finite."""
    token_ids = argmax(logits)
    if batch.row_groups.all_greedy:
        return token_ids
    is_chosen = token_ids < 0 if batch.columns.greedy is None else batch.columns.greedy | (token_ids < 0)
    return torch.where(is_chosen, token_ids, draw(logits, batch.u))


def stage_name(stage: Stage) -> str:
    """Return the name of a stage in errors and traces."""
    return getattr(stage, "__name__", repr(stage))


def _rows_with_logprobs(logits: Logits, batch: SamplingBatch) -> Float[Tensor, "rows vocab"]:
    """Copy the rows that return log-probabilities, before a stage writes into them."""
    if not batch.row_groups.logprobs:
        return logits[:0]
    return logits[on_device(torch.tensor([row for row, _ in batch.row_groups.logprobs]), logits.device)]
