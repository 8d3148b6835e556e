"""The stages between the model and the draw, as functions, and their order (STAGES).

Each stage takes logits [batch, vocab] in fp32 and the batch, and returns logits. -inf means that a token cannot be drawn. A
stage never lets a dropped token back in, and treats every row as if it were alone. A row without any token left may become NaN
in later stages, which the sampler checks at the end. Probabilities are written p = softmax(logits).

The stages before apply_temperature change few logits and write them in place. Copying 64 rows of 151,936 logits to change some
thousands would cost more than the rest of the stage. The last four stages return new logits.
"""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.errors import InvalidTypeError
from nanoinfer.sampling.batch import SamplingBatch, TokenEntries
from nanoinfer.sampling.draw import ONE, integer_weights

Logits = Float[Tensor, "batch vocab"]
Stage = Callable[[Tensor, SamplingBatch], Tensor]


def keep_allowed(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid all but allowed_token_ids."""
    if (allowed := batch.allowed) is None:
        return logits
    assert batch.allowed_rows is not None, "allowed and allowed_rows are set together"
    kept = allowed.read(logits)
    logits.index_fill_(0, batch.allowed_rows, float("-inf"))
    allowed.write(logits, kept)
    return logits


def keep_grammatical(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid the ids that the grammar of structured_outputs does not allow next."""
    if (grammar := batch.grammar) is None:
        return logits
    if len(grammar.rows) == len(logits):  # in place: a third of the time of reading and writing rows
        return logits.masked_fill_(grammar.forbidden, float("-inf"))
    logits[grammar.rows] = logits[grammar.rows].masked_fill_(grammar.forbidden, float("-inf"))
    return logits


def end_thinking(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid all but the end of reasoning that has thinking_token_budget tokens, unless a stage before forbids the end."""
    if (ends := batch.end_thinking) is None:
        return logits
    rows, kept = logits[ends.rows], ends.read(logits).unsqueeze(-1)  # [entries, vocab], [entries, 1]
    ended = torch.full_like(rows, float("-inf")).scatter_(1, ends.ids.unsqueeze(-1), kept)
    logits[ends.rows] = torch.where(kept > float("-inf"), ended, rows)
    return logits


def mask_bad_words(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid the last token of a bad word whose other tokens are the end of the output."""
    return _forbid(logits, batch.bad_words)


def mask_min_tokens(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid EOS and stop ids in rows with fewer than min_tokens output tokens."""
    return _forbid(logits, batch.min_tokens)


def add_logit_bias(logits: Logits, batch: SamplingBatch) -> Logits:
    """Add the given numbers to the given ids. A forbidden token stays forbidden."""
    if (bias := batch.logit_bias) is not None and bias.values is not None:
        bias.write(logits, bias.read(logits) + bias.values)
    return logits


def apply_repetition_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Make ids of prompt and output less likely, once each: divide positive logits by the penalty, multiply all others.

    Example: logits [2, -2, 1], ids 0 and 1 in prompt or output, penalty 2: [1, -4, 1].
    Source: Keskar et al. 2019, https://arxiv.org/abs/1909.05858
    """
    counts, penalties = batch.token_counts, batch.repetition_penalty
    if counts is None or penalties is None:
        return logits
    old, penalty = counts.read(logits), penalties[counts.rows]  # [entries]
    penalized = torch.where(old > 0, old / penalty, old * penalty)
    counts.write(logits, penalized.clamp_(max=torch.finfo(logits.dtype).max))  # a tiny penalty must not make infinity
    return logits


def apply_frequency_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Subtract the penalty from an id's logit once for each occurrence in the output.

    Source: vLLM's and OpenAI's definition, https://platform.openai.com/docs/guides/text-generation
    """
    counts, penalties = batch.token_counts, batch.frequency_penalty
    if counts is not None and counts.values is not None and penalties is not None:
        counts.write(logits, counts.read(logits) - penalties[counts.rows] * counts.values)
    return logits


def apply_presence_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Subtract the penalty from an id's logit once if the id is in the output."""
    counts, penalties = batch.token_counts, batch.presence_penalty
    if counts is not None and counts.values is not None and penalties is not None:
        counts.write(logits, counts.read(logits) - penalties[counts.rows] * (counts.values > 0))
    return logits


def mask_repeated_ngrams(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid tokens that would repeat a run of no_repeat_ngram_size tokens of prompt + output.

    Example: [5, 6, 5] and size 2: id 6 would repeat "5 6".
    """
    return _forbid(logits, batch.repeated_ngrams)


def apply_logits_processors(logits: Logits, batch: SamplingBatch) -> Logits:
    """Call each row's own functions: (prompt_ids, output_ids, logits [vocab]) -> logits [vocab].

    Raises:
        InvalidTypeError: a function returned something else. Errors of the functions themselves pass through.
    """
    for row, seq in batch.with_processors.items():
        processors: Iterable[Callable[..., Tensor]] = seq.params.logits_processors or ()  # each takes three arguments
        for processor in processors:
            before = logits[row]
            after = processor(list(seq.prompt_token_ids), seq.output_token_ids, before)
            if not isinstance(after, Tensor) or after.shape != before.shape:
                got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
                raise InvalidTypeError(f"a logits processor must return logits of shape {tuple(before.shape)}, got {got}")
            logits[row] = after
    return logits


def apply_temperature(logits: Logits, batch: SamplingBatch) -> Logits:
    """Divide by the temperature: below 1 the distribution becomes sharper, above 1 flatter.

    The maximum is subtracted first, so that a tiny temperature drives the other logits to -inf and not the largest to +inf. A
    row at temperature 1 keeps its bits, whatever the temperatures of the other rows.
    Example: logits [2, 1, 0] at temperature 0.5 become [0, -2, -4].
    """
    return logits if batch.temperature is None else divided(logits, batch.temperature)


def divided(logits: Logits, temperature: Float[Tensor, " batch"]) -> Logits:
    """Divide the logits of each row by its temperature: see apply_temperature."""
    shift = torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1))  # [batch]
    return (logits - shift.unsqueeze(-1)) / temperature.unsqueeze(-1)


def keep_min_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Drop tokens with p < min_p * p_max, so that a flat distribution keeps more tokens than a sharp one.

    Example: p = [.5, .3, .2], min_p = .5 keeps two (the threshold is .25).
    Source: Nguyen et al. 2024, https://arxiv.org/abs/2407.01082
    """
    if (min_p := batch.min_p) is None:
        return logits
    ratio = integer_weights(logits).float() / ONE  # p / p_max, without the sum of a softmax
    return logits.masked_fill(ratio < min_p.unsqueeze(-1), float("-inf"))


def keep_top_k(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the k largest logits, and all that equal the k-th.

    Example: p = [.3, .2, .2, .2, .1], k = 2 keeps four: three tokens tie for the second place.
    """
    if batch.top_k is None:
        return logits
    smallest = smallest_of_top_k(logits, batch, logits.shape[-1])
    return logits.masked_fill(logits < smallest.unsqueeze(-1), float("-inf"))


def smallest_of_top_k(logits: Float[Tensor, "batch columns"], batch: SamplingBatch, vocab_size: int) -> Float[Tensor, " batch"]:
    """Return the k-th largest logit of each row, -inf for a row without top_k. The columns contain the k largest."""
    assert batch.top_k is not None
    is_on = batch.top_k < vocab_size
    k = torch.where(is_on, batch.top_k, 1)  # rows without top_k must not make topk sort the whole vocabulary
    largest = logits.topk(max(batch.max_top_k, 1), dim=-1).values  # [batch, largest k], in falling order
    return torch.where(is_on, largest.gather(-1, k.unsqueeze(-1) - 1).squeeze(-1), float("-inf"))


def keep_top_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the smallest set of tokens whose probabilities sum to at least top_p.

    Tokens enter by falling probability, equal tokens by rising id. The token that crosses top_p is kept, so at least one token
    survives. At exact equality no further token is kept. Sums are of integer weights (draw.py), hence exact.
    Example: p = [.5, .3, .2], top_p = .6 keeps two; p = [.5, .25, .25], top_p = .5 keeps one.
    Source: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751
    """
    if batch.top_p is None:
        return logits
    return drop_beyond(logits, batch.top_p)


def drop_beyond(logits: Logits, top_p: Float[Tensor, " batch"], total: Int[Tensor, " batch"] | None = None) -> Logits:
    """Drop a token if the weights of the tokens before it sum to at least top_p * total. total: None: the sum of all."""
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = integer_weights(falling)
    cumulative = weights.cumsum(dim=-1)
    before = cumulative - weights  # the sum of the tokens that enter earlier
    enough = top_p * (cumulative[:, -1] if total is None else total)  # float64
    dropped = (before >= enough.unsqueeze(-1)) & (top_p < 1.0).unsqueeze(-1)
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), float("-inf"))


def _forbid(logits: Logits, entries: TokenEntries | None) -> Logits:
    if entries is not None:
        logits[entries.rows, entries.ids] = float("-inf")
    return logits


STAGES: tuple[Stage, ...] = (
    keep_allowed,
    keep_grammatical,
    end_thinking,
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
STAGES_BEFORE_TEMPERATURE = STAGES[: STAGES.index(apply_temperature)]  # they change few logits, in place
STAGES_FROM_TEMPERATURE = STAGES[STAGES.index(apply_temperature) :]  # they return new logits


def stage_name(stage: Stage) -> str:
    """Return the name of a stage in errors and traces."""
    return getattr(stage, "__name__", repr(stage))
