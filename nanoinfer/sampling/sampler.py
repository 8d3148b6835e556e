"""Logits -> one token id per row: every stage in its order, then the draw. STAGES is the order.

In: logits [batch, vocab] and a SamplingBatch. Out: Drawn, and from it a SamplerOutput. The sampler knows no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.devices.transfer import on_device
from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.sampling import fast
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.sampling.draw import draw
from nanoinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from nanoinfer.sampling.stage_trace import StageTracer
from nanoinfer.sampling.stages import (
    add_logit_bias,
    apply_frequency_penalty,
    apply_logits_processors,
    apply_presence_penalty,
    apply_repetition_penalty,
    apply_temperature,
    keep_allowed,
    keep_grammatical,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    mask_bad_words,
    mask_min_tokens,
    mask_repeated_ngrams,
)

Stage = Callable[[Tensor, SamplingBatch], Tensor]
Logits = Float[Tensor, "batch vocab"]

STAGES: tuple[Stage, ...] = (
    keep_allowed,
    keep_grammatical,
    mask_bad_words,
    mask_min_tokens,
    add_logit_bias,
    apply_repetition_penalty,
    apply_frequency_penalty,
    apply_presence_penalty,
    mask_repeated_ngrams,
    apply_logits_processors,
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
STAGES_BEFORE_FAST = STAGES[: -len(fast.LAST_STAGES)]  # fast.py replaces the last four and the draw

NOT_FINITE = "the model's logits are not finite; check the checkpoint, or try dtype='float32'"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The tokens of one step.

    token_ids[i] is row i's token, or -1 if row i has none. errors[i] then says why. logprobs[i] holds the log-probabilities of
    row i, if the row requested them and has a token.
    """

    token_ids: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Drawn:
    """The tokens of one step, still on their device. read() waits for them. Until then the device may run other work."""

    def __init__(self, token_ids: Int[Tensor, " batch"], read: Callable[[list[int]], SamplerOutput]) -> None:
        """Start copying the ids to the host.

        Args:
            token_ids: -1 where a row has no token.
            read: makes the SamplerOutput from the ids on the host.
        """
        self.token_ids = token_ids
        self._read = read
        self._on_host, self._is_there = token_ids, None
        if token_ids.is_cuda:  # the copy is queued after the draw, and before the next work of the device
            self._on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._on_host.copy_(token_ids, non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def read(self) -> SamplerOutput:
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._read(self._on_host.tolist())


class Sampler:
    """Draws the tokens of a step. A call takes one of four routes, which give the same tokens.

    Greedy rows pass through the stages like all other rows, and take the argmax at the end: of equal maxima the lowest id.
    """

    def __init__(
        self, stages: tuple[Stage, ...] = STAGES, *, processed_logprobs: bool = False, graphs: SamplerGraphs | None = None
    ) -> None:
        """Check and keep the stages.

        Args:
            stages: in their order. `[*STAGES, mine]` adds a stage, (logits [batch, vocab], SamplingBatch) -> logits. With
                stages other than STAGES every row runs stage by stage.
            processed_logprobs: return the log-probabilities after all stages instead of the model's own.
            graphs: CUDA graphs of the draw, replayed in the steps that they support.

        Raises:
            InvalidValueError: a stage of STAGES is missing.
        """
        if missing := [_name(stage) for stage in STAGES if stage not in stages]:
            raise InvalidValueError(
                f"stages lacks {', '.join(missing)}, so parameters would be ignored; use [*STAGES, mine], STAGES being in "
                "nanoinfer.sampling.sampler"
            )
        self.stages = stages
        self.processed_logprobs = processed_logprobs
        self.graphs = graphs

    @property
    def has_user_stages(self) -> bool:
        return self.stages != STAGES

    def __call__(self, logits: Logits, batch: SamplingBatch, tracer: StageTracer | None = None) -> Drawn:
        """Draw one token per row by the cheapest route that is exact.

        Args:
            logits: fp32. The stages may write into them.
            batch: the parameters of the rows.
            tracer: receives the logits after every stage.
        """
        if not len(logits):
            return self._draw_no_rows()
        processes_logprobs = self.processed_logprobs and bool(batch.groups.logprobs)
        if tracer is not None or self.has_user_stages or processes_logprobs:
            return self._draw_stage_by_stage(logits.contiguous(), batch, tracer)
        if self.graphs is not None and (token_ids := self.graphs.sample(logits, batch)) is not None:
            return self.drawn(token_ids)
        return self._draw_fast(logits.contiguous(), batch)  # contiguous: a copy of expanded logits, which cannot be written

    def _draw_no_rows(self) -> Drawn:
        """The step computes only parts of prompts. No stage is called: a user's stage need not handle zero rows."""
        return Drawn(torch.empty(0, dtype=torch.int64), lambda _: SamplerOutput([], {}))

    def drawn(self, token_ids: Int[Tensor, " batch"]) -> Drawn:
        """A CUDA graph, several ranks or the kernel for greedy rows have drawn.

        No stage has removed a row's last token, so -1 means: no finite logit.
        """

        def read(sampled: list[int]) -> SamplerOutput:
            return SamplerOutput(sampled, {row: NOT_FINITE for row, token_id in enumerate(sampled) if token_id < 0})

        return Drawn(token_ids, read)

    def _draw_stage_by_stage(self, logits: Logits, batch: SamplingBatch, tracer: StageTracer | None) -> Drawn:
        """Run every stage on every row, then the draw: the definition that the other routes must reproduce."""
        model_logits = _rows_with_logprobs(logits, batch)
        is_finite = logits.amax(dim=-1).isfinite()
        if tracer is not None:
            tracer.after_stage("model", logits)
        logits = self._apply(self.stages, logits, batch, tracer)
        largest, argmax = logits.max(dim=-1)  # the first of equal maxima
        token_ids = argmax if batch.groups.all_greedy else draw(logits, batch.u)
        if batch.columns.greedy is not None:
            token_ids = torch.where(batch.columns.greedy, argmax, token_ids)
        token_ids = torch.where(is_finite & largest.isfinite(), token_ids, -1)
        if tracer is not None:
            greedy = set(batch.groups.greedy_rows)
            tracer.after_draw(logits, [None if row in greedy else u for row, u in enumerate(batch.u.tolist())], token_ids)
        logprob_logits = _rows_with_logprobs(logits, batch) if self.processed_logprobs else model_logits
        return self._drawn(token_ids, logits, is_finite, logprob_logits, batch)

    def _draw_fast(self, logits: Logits, batch: SamplingBatch) -> Drawn:
        """Run the stages before the temperature, then fast.sample."""
        model_logits = _rows_with_logprobs(logits, batch)
        is_finite = logits.amax(dim=-1).isfinite() if batch.masks_logits else None
        if batch.changes_logits:
            logits = self._apply(STAGES_BEFORE_FAST, logits, batch)
        token_ids, largest = fast.sample(logits, batch)
        has_token = largest.isfinite() if is_finite is None else is_finite & largest.isfinite()
        return self._drawn(torch.where(has_token, token_ids, -1), logits, is_finite, model_logits, batch)

    def _apply(
        self, stages: tuple[Stage, ...], logits: Logits, batch: SamplingBatch, tracer: StageTracer | None = None
    ) -> Logits:
        for stage in stages:
            processed = stage(logits, batch)
            if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                raise InvalidTypeError(f"stage {_name(stage)} must return logits of shape {tuple(logits.shape)}, got {got}")
            logits = processed.contiguous()
            if tracer is not None:
                tracer.after_stage(_name(stage), logits)
        return logits

    def _drawn(
        self,
        token_ids: Int[Tensor, " batch"],
        logits: Logits,
        is_finite: Bool[Tensor, " batch"] | None,
        logprob_logits: Float[Tensor, "rows vocab"],
        batch: SamplingBatch,
    ) -> Drawn:
        """Pack the tokens, with what reading them needs.

        is_finite: of the model's logits, before a mask may hide a NaN or an infinity. None: no stage masks.
        """

        def read(sampled: list[int]) -> SamplerOutput:
            errors = {
                row: self._explain_empty_row(logits, batch, row) if is_finite is None or is_finite[row] else NOT_FINITE
                for row, token_id in enumerate(sampled)
                if token_id < 0
            }
            return SamplerOutput(sampled, errors, _logprobs(logprob_logits, batch, sampled))

        return Drawn(token_ids, read)

    def _explain_empty_row(self, logits: Logits, batch: SamplingBatch, row: int) -> str:
        """Name the stage that removed a row's last token: run the stages again on zeros, and check after each.

        Users' functions are not run again, since they may count their calls. They are named if no other stage did it.
        """
        if batch.entries.grammar is not None and row in batch.entries.grammar.errors:
            return batch.entries.grammar.errors[row]
        users = [stage for stage in self.stages if stage not in STAGES]
        if any(row_processors.row == row for row_processors in batch.processors):
            users.append(apply_logits_processors)
        blank = torch.zeros_like(logits)
        for stage in STAGES:
            if stage is not apply_logits_processors:
                blank = stage(blank, batch)
            if not blank[row].amax().isfinite():
                return f"no token is left to draw after {_name(stage)}; loosen the parameters that it reads"
        if users:
            names = " and ".join(_name(stage) for stage in users)
            return f"no token is left to draw after {names}; leave one logit finite, and make none infinite or NaN"
        return NOT_FINITE


def _name(stage: Stage) -> str:
    return getattr(stage, "__name__", repr(stage))


def _rows_with_logprobs(logits: Logits, batch: SamplingBatch) -> Float[Tensor, "rows vocab"]:
    """Copy the rows that return log-probabilities, before a stage writes into them."""
    if not batch.groups.logprobs:
        return logits[:0]
    return logits[on_device(torch.tensor([row for row, _ in batch.groups.logprobs]), logits.device)]


def _logprobs(logits: Float[Tensor, "rows vocab"], batch: SamplingBatch, token_ids: list[int]) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row. logits: of the rows that return them. A row without a token gets none."""
    if not batch.groups.logprobs:
        return {}
    rows, nums = zip(*batch.groups.logprobs, strict=True)
    entries = token_logprobs(logits, [max(token_ids[row], 0) for row in rows], list(nums))
    return {row: entry for row, entry in zip(rows, entries, strict=True) if token_ids[row] >= 0}
