"""What each stage of the sampler did to each row, for a tracer that asks: StageApplied and TokenDrawn events.

In: logits [batch, vocab] after every stage, then the draw. Out: events. It changes no logits.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.sampling.draw import integer_weights
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer.tracing import Candidate, Interval, StageApplied, TokenDrawn, Tracer

NUM_CANDIDATES = 10  # of the likeliest before a stage, and of the likeliest after it; and the drawn token


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a stage did: probabilities before and after it."""

    stage: str
    rows: list[int]  # those it changed
    num_left: list[int]  # of every row
    before: Float[Tensor, "batch vocab"]
    after: Float[Tensor, "batch vocab"]


class StageTracer:
    """Looks on while one step's rows are sampled, and tells when all is over: then the drawn token is known, which every stage
    shall tell of. Until then it keeps the probabilities of all rows after every stage that changed one.
    """

    def __init__(self, tracer: Tracer, sequences: Rows[Sequence], tokenizer: Tokenizer | None) -> None:
        """sequences: the rows', in their order."""
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._rows = [(seq.sequence_id, seq.num_tokens) for seq in sequences]  # whose row, and the position it draws for
        self._logits: Tensor | None = None  # as they were last seen
        self._seen: list[_Seen] = []

    def after_stage(self, stage: str, logits: Float[Tensor, "batch vocab"]) -> None:
        """Call it with the model's own logits first, and after every stage."""
        rows = list(range(len(logits)))
        if self._logits is not None:
            rows = (logits != self._logits).any(dim=-1).nonzero().flatten().tolist()
        if rows:
            after = logits.softmax(dim=-1).nan_to_num_(0.0)  # NaN: a row in which nothing is left
            before = self._seen[-1].after if self._seen else after
            self._seen.append(_Seen(stage, rows, (logits > float("-inf")).sum(dim=-1).tolist(), before, after))
            self._logits = logits.clone()

    def after_draw(self, logits: Float[Tensor, "batch vocab"], u: list[float | None], token_ids: Int[Tensor, " batch"]) -> None:
        """Call it with the logits that were drawn from. u: None for greedy rows. token_ids: -1 where nothing could be drawn."""
        drawn = token_ids.tolist()
        for seen in self._seen:
            for row in seen.rows:
                candidates = self._candidates(seen.before[row], seen.after[row], drawn[row])
                self._tracer.emit(StageApplied(*self._rows[row], seen.stage, seen.num_left[row], candidates))
        weights = integer_weights(logits)
        highs = weights.cumsum(dim=-1)
        for row, token_id in enumerate(drawn):
            if token_id >= 0:
                self._tracer.emit(self._draw(row, token_id, u[row], weights[row], highs[row]))

    def _draw(
        self, row: int, token_id: int, u: float | None, weights: Int[Tensor, " vocab"], highs: Int[Tensor, " vocab"]
    ) -> TokenDrawn:
        total, num_left = int(highs[-1]), int((weights > 0).sum())
        widest = weights.topk(min(2 * NUM_CANDIDATES, num_left)).indices.tolist()
        intervals = {}
        for i in sorted({*widest, token_id}):
            end, width = int(highs[i]), int(weights[i])
            intervals[i] = Interval(i, self._text(i), (end - width) / total, end / total)
        drawn = intervals[token_id]
        return TokenDrawn(*self._rows[row], token_id, drawn.token, u, drawn.low, drawn.high, tuple(intervals.values()))

    def _candidates(self, before: Float[Tensor, " vocab"], after: Float[Tensor, " vocab"], drawn: int) -> tuple[Candidate, ...]:
        leading = [probs.topk(min(NUM_CANDIDATES, len(probs))) for probs in (before, after)]
        ids = torch.cat([top.indices[top.values > 0] for top in leading]).unique().tolist()
        ids = sorted({*ids, drawn} - {-1}, key=lambda i: (-float(before[i]), i))
        return tuple(Candidate(i, self._text(i), float(before[i]), float(after[i])) for i in ids)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer else ""
