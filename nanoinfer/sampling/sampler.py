"""Logits -> one token id per row: every stage in its order, then the draw. STAGES is the order.

In: logits [batch, vocab] and a SamplingBatch. Out: SamplerOutput. It knows no sequence and no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
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
    keep_min_p,
    keep_top_k,
    keep_top_p,
    mask_bad_words,
    mask_min_tokens,
    mask_repeated_ngrams,
)

Stage = Callable[[Tensor, SamplingBatch], Tensor]

STAGES: tuple[Stage, ...] = (
    keep_allowed,
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

NOT_FINITE = "the model's logits are not finite; check the checkpoint, or try dtype='float32'"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids[i] is row i's token; errors[i], where there is one, says why row i has none (its token_ids[i] is -1).

    logprobs[i]: what row i asked for, if it did and has a token.
    """

    token_ids: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Drawn:
    """What a step drew, still on its device. read() waits for it; until then the device may go on with other work."""

    def __init__(self, token_ids: Int[Tensor, " batch"], read: Callable[[list[int]], SamplerOutput]) -> None:
        """token_ids: -1 where a row has none. read: from the ids on the host to all that was asked for."""
        self.token_ids = token_ids
        self._read = read
        self._on_host, self._is_there = token_ids, None
        if token_ids.is_cuda:  # copied behind the drawing, and before whatever the device is given next
            self._on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._on_host.copy_(token_ids, non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def read(self) -> SamplerOutput:
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._read(self._on_host.tolist())


class Sampler:
    """Callable once per step. Greedy rows pass through the stages like the others, and take the argmax at the end.

    stages: in their order; `[*STAGES, mine]` adds one of yours, (logits [batch, vocab], SamplingBatch) -> logits. With stages
    of yours every row takes the plain list; otherwise fast.py finds the same tokens sooner.
    processed_logprobs: tell the log-probabilities after all stages, instead of the model's own.
    graphs: recordings that find them sooner still on a GPU, in the steps that they cover.
    """

    def __init__(
        self, stages: tuple[Stage, ...] = STAGES, *, processed_logprobs: bool = False, graphs: SamplerGraphs | None = None
    ) -> None:
        if missing := [_name(stage) for stage in STAGES if stage not in stages]:
            raise InvalidValueError(
                f"stages lacks {', '.join(missing)}, so parameters would be ignored; use [*STAGES, mine], STAGES being in "
                "nanoinfer.sampling.sampler"
            )
        self.stages = stages
        self.processed_logprobs = processed_logprobs
        self.graphs = graphs

    def __call__(self, logits: Float[Tensor, "batch vocab"], batch: SamplingBatch, watch: StageTracer | None = None) -> Drawn:
        """The argmax of a greedy row is the lowest id among equals. logits: fp32; the stages may write into them.

        watch: is told what every stage does; then, too, every row takes the plain list.
        """
        if not len(logits):  # only prompts that go on: no stage of yours is called for nothing
            return Drawn(torch.empty(0, dtype=torch.int64), lambda _: SamplerOutput([], {}))
        has_own_way = watch is not None or self.stages != STAGES
        if self.graphs and not has_own_way and (replayed := self.graphs.sample(logits, batch)) is not None:
            return Drawn(replayed, _read_replayed)
        logits = logits.contiguous()  # a copy if it was expanded, which cannot be written
        told = self._told(logits, batch)  # a copy: the model's own
        is_plain = has_own_way or (self.processed_logprobs and batch.logprobs)
        if is_plain or batch.masks_logits:
            were_finite = logits.amax(dim=-1).isfinite()  # a mask may hide a NaN or an infinity of the model's
        else:
            were_finite = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        if is_plain:
            logits = self._apply(logits, batch, self.stages, watch)
            largest, argmax = logits.max(dim=-1)  # the first of equal maxima
            token_ids = argmax if batch.all_greedy else draw(logits, batch.u)
            if batch.greedy is not None:
                token_ids = torch.where(batch.greedy, argmax, token_ids)
            if self.processed_logprobs:
                told = self._told(logits, batch)
        else:
            logits = self._apply(logits, batch, STAGES[: -len(fast.LAST_STAGES)])
            token_ids, largest = fast.sample(logits, batch)
        token_ids = torch.where(were_finite & largest.isfinite(), token_ids, -1)  # tokens and failures in one read-back
        if watch is not None:
            greedy = set(batch.greedy_rows)
            watch.after_draw(logits, [None if row in greedy else u for row, u in enumerate(batch.u.tolist())], token_ids)

        def read(sampled: list[int]) -> SamplerOutput:
            errors = {
                row: self._explain_empty_row(logits, batch, row) if were_finite[row] else NOT_FINITE
                for row, token_id in enumerate(sampled)
                if token_id < 0
            }
            return SamplerOutput(sampled, errors, _logprobs(told, batch, sampled))

        return Drawn(token_ids, read)

    def _told(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """The rows that want log-probabilities."""
        if not batch.logprobs:
            return logits[:0]
        return logits[on_device(torch.tensor([row for row, _ in batch.logprobs]), logits.device)]

    def _apply(
        self, logits: Tensor, batch: SamplingBatch, stages: tuple[Stage, ...], watch: StageTracer | None = None
    ) -> Tensor:
        if watch is not None:
            watch.after_stage("model", logits)
        for stage in stages:
            processed = stage(logits, batch)
            if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                raise InvalidTypeError(f"stage {_name(stage)} must return logits of shape {tuple(logits.shape)}, got {got}")
            logits = processed.contiguous()
            if watch is not None:
                watch.after_stage(_name(stage), logits)
        return logits

    def _explain_empty_row(self, logits: Tensor, batch: SamplingBatch, row: int) -> str:
        """Which stage took a row's last token: run them again on zeros, looking after each.

        Users' functions are not run again, since they may keep count of their calls: they did it if no other stage does.
        """
        others = [stage for stage in self.stages if stage not in STAGES]
        if any(its.row == row for its in batch.processors):
            others.append(apply_logits_processors)
        blank = torch.zeros_like(logits)
        for stage in STAGES:
            if stage is not apply_logits_processors:
                blank = stage(blank, batch)
            if not blank[row].amax().isfinite():
                return f"no token is left to draw after {_name(stage)}; loosen the parameters that it reads"
        if others:
            names = " and ".join(_name(stage) for stage in others)
            return f"no token is left to draw after {names}; leave one logit finite, and make none infinite or NaN"
        return NOT_FINITE


def _name(stage: Stage) -> str:
    return getattr(stage, "__name__", repr(stage))


def _read_replayed(sampled: list[int]) -> SamplerOutput:
    """Of a step in which no stage takes a row's last token: one without a token had no finite logits."""
    return SamplerOutput(sampled, {row: NOT_FINITE for row, token_id in enumerate(sampled) if token_id < 0})


def _logprobs(told: Tensor, batch: SamplingBatch, sampled: list[int]) -> dict[int, TokenLogprobs]:
    """told: logits of the rows that want log-probabilities. A row without a token gets none."""
    if not batch.logprobs:
        return {}
    rows, nums = zip(*batch.logprobs, strict=True)
    token_logprobs_of = token_logprobs(told, [max(sampled[row], 0) for row in rows], list(nums))
    return {row: its for row, its in zip(rows, token_logprobs_of, strict=True) if sampled[row] >= 0}
