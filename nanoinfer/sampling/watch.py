"""What each stage of the sampler did to each row, for a tracer that asks: StageApplied and TokenDrawn events.

In: logits [batch, vocab] after every stage, then the draw. Out: events. It changes no logits.
"""

from collections.abc import Sequence as Rows

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.sampling.draw import integer_weights
from nanoinfer.sequence import Sequence
from nanoinfer.tokenizer import Tokenizer
from nanoinfer.tracing import Candidate, Interval, StageApplied, TokenDrawn, Tracer

NUM_CANDIDATES = 10  # of the likeliest before a stage, and of the likeliest after it


class StageWatch:
    """Looks on while one step's rows are sampled."""

    def __init__(self, tracer: Tracer, sequences: Rows[Sequence], tokenizer: Tokenizer | None) -> None:
        """sequences: the rows', in their order."""
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._rows = [(seq.sequence_id, seq.num_tokens) for seq in sequences]  # whose row, and the position it draws for
        self._logits: Tensor | None = None  # as they were last seen
        self._probs: Tensor | None = None

    def saw(self, stage: str, logits: Float[Tensor, "batch vocab"]) -> None:
        """Call it with the model's own logits first, and after every stage."""
        probs = logits.softmax(dim=-1).nan_to_num_(0.0)  # a row in which nothing is left
        before, is_changed = self._probs, [True] * len(logits)
        if before is None or self._logits is None:
            before = probs
        else:
            is_changed = (logits != self._logits).any(dim=-1).tolist()
        self._logits, self._probs = logits.clone(), probs
        for row, (sequence_id, position) in enumerate(self._rows):
            if is_changed[row]:
                num_left = int((logits[row] > float("-inf")).sum())
                candidates = self._candidates(before[row], probs[row])
                self._tracer.emit(StageApplied(sequence_id, position, stage, num_left, candidates))

    def drew(self, logits: Float[Tensor, "batch vocab"], u: list[float | None], token_ids: Int[Tensor, "batch"]) -> None:
        """Call it with the logits that were drawn from. u: None for greedy rows. token_ids: -1 where nothing could be drawn."""
        weights = integer_weights(logits)
        highs = weights.cumsum(dim=-1)
        for row, token_id in enumerate(token_ids.tolist()):
            if token_id < 0:
                continue
            total = int(highs[row, -1])
            num_left = int((weights[row] > 0).sum())
            widest = weights[row].topk(min(2 * NUM_CANDIDATES, num_left)).indices.tolist()
            intervals = {}
            for i in sorted({*widest, token_id}):
                end, width = int(highs[row, i]), int(weights[row, i])
                intervals[i] = Interval(i, self._text(i), (end - width) / total, end / total)
            drawn = intervals[token_id]
            self._tracer.emit(
                TokenDrawn(*self._rows[row], token_id, drawn.token, u[row], drawn.low, drawn.high, tuple(intervals.values()))
            )

    def _candidates(self, before: Float[Tensor, "vocab"], after: Float[Tensor, "vocab"]) -> tuple[Candidate, ...]:
        leading = [probs.topk(min(NUM_CANDIDATES, len(probs))) for probs in (before, after)]
        ids = torch.cat([top.indices[top.values > 0] for top in leading]).unique()
        ids = ids[before[ids].sort(descending=True, stable=True).indices]
        numbers = zip(ids.tolist(), before[ids].tolist(), after[ids].tolist(), strict=True)
        return tuple(Candidate(i, self._text(i), earlier, later) for i, earlier, later in numbers)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer else ""
