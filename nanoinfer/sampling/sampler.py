"""Logits -> one token id per row: every stage in its order, then the draw. STAGES is the order.

In: logits [batch, vocab] and a SamplingBatch. Out: SamplerOutput. It knows no sequence and no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.sampling import fast
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import draw, uniform
from nanoinfer.sampling.logprobs import TokenLogprobs, token_logprobs
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


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids[i] is row i's token; errors[i], where there is one, says why row i has none (its token_ids[i] is -1).

    logprobs[i]: what row i asked for, if it did and has a token.
    """

    token_ids: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Callable once per step. Greedy rows pass through the stages like the others, and take the argmax at the end.

    stages: in their order; `[*STAGES, mine]` adds one of yours, (logits [batch, vocab], SamplingBatch) -> logits. With stages
    of yours every row takes the plain list; otherwise fast.py finds the same tokens sooner.
    processed_logprobs: tell the log-probabilities after all stages, instead of the model's own.
    """

    def __init__(self, stages: tuple[Stage, ...] = STAGES, *, processed_logprobs: bool = False) -> None:
        if missing := [_name(stage) for stage in STAGES if stage not in stages]:
            raise InvalidValueError(
                f"stages lacks {', '.join(missing)}, so parameters would be ignored; use [*STAGES, mine], STAGES being in "
                "nanoinfer.sampling.sampler"
            )
        self.stages = stages
        self.processed_logprobs = processed_logprobs

    def __call__(self, logits: Float[Tensor, "batch vocab"], batch: SamplingBatch) -> SamplerOutput:
        """The argmax of a greedy row is the lowest id among equals. logits: fp32; they are left as they are."""
        if not len(logits):  # only prompts that go on: no stage of yours is called for nothing
            return SamplerOutput([], {})
        needs_plain_list = self.stages != STAGES or (self.processed_logprobs and batch.logprobs)
        if needs_plain_list:
            processed = self._apply(logits, batch, self.stages)
            largest, argmax = processed.max(dim=-1)  # the first of equal maxima
            token_ids = argmax if batch.all_greedy else draw(processed, uniform(batch.seeds, batch.positions))
            if batch.greedy is not None:
                token_ids = torch.where(batch.greedy, argmax, token_ids)
        else:
            processed = self._apply(logits, batch, STAGES[: -len(fast.LAST_STAGES)]) if batch.changes_logits else logits
            token_ids, largest = fast.sample(processed, batch)
        drawable = largest.isfinite()
        if processed is not logits:  # stages may hide a NaN or an infinity of the model's
            drawable &= logits.amax(dim=-1).isfinite()
        sampled = torch.where(drawable, token_ids, -1).tolist()  # one read-back for tokens and failures
        errors = {row: self._what_left_nothing(logits, batch, row) for row, token_id in enumerate(sampled) if token_id < 0}
        told = processed if self.processed_logprobs else logits
        return SamplerOutput(sampled, errors, _logprobs(told, batch, sampled))

    def _apply(self, logits: Tensor, batch: SamplingBatch, stages: tuple[Stage, ...]) -> Tensor:
        """Run stages over a copy."""
        processed = logits.clone()
        for stage in stages:
            processed = stage(processed, batch)
            if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
                raise InvalidTypeError(f"stage {_name(stage)} must return logits of shape {tuple(logits.shape)}, got {got}")
        return processed

    def _what_left_nothing(self, logits: Tensor, batch: SamplingBatch, row: int) -> str:
        """Which stage took a row's last token: run them again, looking after each.

        Users' functions are not run again, since they may keep count of their calls: they did it if no other stage does.
        """
        if not logits[row].amax().isfinite():
            return "the model's logits are not finite; check the checkpoint, or try dtype='float32'"
        others = [stage for stage in self.stages if stage not in STAGES]
        if any(its.row == row for its in batch.processors):
            others.append(apply_logits_processors)
        again = tuple(stage for stage in self.stages if stage in STAGES and stage is not apply_logits_processors)
        for count, stage in enumerate(again, start=1):
            if not self._apply(logits, batch, again[:count])[row].amax().isfinite():
                return f"no token is left to draw after {_name(stage)}; loosen the parameters that it reads"
        names = " and ".join(_name(stage) for stage in others)
        return f"no token is left to draw after {names}; leave one logit finite, and make none infinite or NaN"


def _name(stage: Stage) -> str:
    return getattr(stage, "__name__", repr(stage))


def _logprobs(logits: Tensor, batch: SamplingBatch, sampled: list[int]) -> dict[int, TokenLogprobs]:
    wanted = [(row, num) for row, num in batch.logprobs if sampled[row] >= 0]
    if not wanted:
        return {}
    rows = [row for row, _ in wanted]
    told = token_logprobs(logits[rows], [sampled[row] for row in rows], [num for _, num in wanted])
    return dict(zip(rows, told, strict=True))
