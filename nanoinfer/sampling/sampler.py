"""Logits -> one token id per row: every stage in its order, then the draw. STAGES is the order.

In: logits [batch, vocab] and a SamplingBatch. Out: SamplerOutput. It knows no sequence and no tokenizer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import draw, uniform

Stage = Callable[[Tensor, SamplingBatch], Tensor]

STAGES: tuple[Stage, ...] = (
    stages.mask_min_tokens,
    stages.apply_temperature,
    stages.keep_min_p,
    stages.keep_top_k,
    stages.keep_top_p,
)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """token_ids[i] is row i's token; errors[i], where there is one, says why row i has none (its token_ids[i] is -1)."""

    token_ids: list[int]
    errors: dict[int, str]


class Sampler:
    """Callable once per step. Greedy rows pass through the stages like the others, and take the argmax at the end."""

    def __call__(self, logits: Float[Tensor, "batch vocab"], batch: SamplingBatch) -> SamplerOutput:
        """The argmax of a greedy row is the lowest id among equals. logits: fp32."""
        masked = logits
        for stage in STAGES:
            masked = stage(masked, batch)
        largest, argmax = masked.max(dim=-1)  # the first of equal maxima
        if batch.all_greedy:
            token_ids = argmax
        else:
            token_ids = draw(masked, uniform(batch.seeds, batch.positions))
            if batch.greedy is not None:
                token_ids = torch.where(batch.greedy, argmax, token_ids)
        # Stages may hide a NaN or an infinity of the model's, so its own logits are looked at, too.
        drawable = largest.isfinite() & logits.amax(dim=-1).isfinite()
        token_ids = torch.where(drawable, token_ids, -1)  # one read-back for tokens and failures
        sampled = token_ids.tolist()
        errors = {row: _what_left_nothing(logits, batch, row) for row, token_id in enumerate(sampled) if token_id < 0}
        return SamplerOutput(sampled, errors)


def _what_left_nothing(logits: Tensor, batch: SamplingBatch, row: int) -> str:
    """Which stage took a row's last token: run them again, looking after each."""
    if not logits[row].amax().isfinite():
        return "the model's logits are not finite; check the checkpoint, or try dtype='float32'"
    for stage in STAGES:
        logits = stage(logits, batch)
        if not logits[row].amax().isfinite():
            return f"no token is left to draw after {stage.__name__}; loosen the parameters that it reads"
    raise AssertionError("a row without a token has a stage that took it")
