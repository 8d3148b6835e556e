"""What is done to the logits before the draw, in the order of sampler.STAGES: a function each.

Each takes logits [batch, vocab] in fp32 and the batch, and returns logits; -inf is "cannot be drawn". A stage never lets a
dropped token back in, and treats every row as if it were alone. A row in which nothing is left may turn into NaNs on its way;
the sampler notices at the end. Probabilities are written p = softmax(logits).

The stages before apply_temperature change few logits and write them in place: copying 64 rows of 151,936 to change some
thousands would cost more than all else they do. The last four return new logits.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.errors import InvalidTypeError
from nanoinfer.sampling.batch import SamplingBatch, TokenEntries
from nanoinfer.sampling.draw import integer_weights

Logits = Float[Tensor, "batch vocab"]


def keep_allowed(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid all but allowed_token_ids."""
    if (allowed := batch.allowed) is None:
        return logits
    assert batch.allowed_rows is not None, "allowed and allowed_rows go together"
    kept = allowed.read(logits)
    logits.index_fill_(0, batch.allowed_rows, float("-inf"))
    allowed.write(logits, kept)
    return logits


def mask_bad_words(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid the last token of a bad word whose other tokens stand at the end of the output."""
    return _forbid(logits, batch.bad_words)


def mask_min_tokens(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid EOS and stop ids in rows that have fewer than min_tokens tokens out."""
    return _forbid(logits, batch.min_tokens)


def add_logit_bias(logits: Logits, batch: SamplingBatch) -> Logits:
    """Add the given numbers to the given ids. A forbidden token stays forbidden."""
    if (bias := batch.logit_bias) is not None and bias.values is not None:
        bias.write(logits, bias.read(logits) + bias.values)
    return logits


def apply_repetition_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Make ids of prompt and output less likely, once each: positive logits are divided by the penalty, others multiplied.

    Example: logits [2, -2, 1], ids 0 and 1 seen, penalty 2: [1, -4, 1].
    Source: Keskar et al. 2019, https://arxiv.org/abs/1909.05858
    """
    if (seen := batch.seen) is None or batch.repetition_penalty is None:
        return logits
    old, penalty = seen.read(logits), batch.repetition_penalty[seen.rows]  # [entries]
    penalized = torch.where(old > 0, old / penalty, old * penalty)
    seen.write(logits, penalized.clamp_(max=torch.finfo(logits.dtype).max))  # a tiny penalty must not make infinity
    return logits


def apply_frequency_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Take the penalty off an id's logit once for each time it is in the output.

    Source: vLLM's and OpenAI's definition, https://platform.openai.com/docs/guides/text-generation
    """
    if (seen := batch.seen) is not None and seen.values is not None and batch.frequency_penalty is not None:
        seen.write(logits, seen.read(logits) - batch.frequency_penalty[seen.rows] * seen.values)
    return logits


def apply_presence_penalty(logits: Logits, batch: SamplingBatch) -> Logits:
    """Take the penalty off an id's logit if it is in the output at all."""
    if (seen := batch.seen) is not None and seen.values is not None and batch.presence_penalty is not None:
        seen.write(logits, seen.read(logits) - batch.presence_penalty[seen.rows] * (seen.values > 0))
    return logits


def mask_repeated_ngrams(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid what would complete a run of no_repeat_ngram_size tokens that prompt + output have already.

    Example: [5, 6, 5] and size 2: id 6 would make "5 6" once more.
    """
    return _forbid(logits, batch.repeated_ngrams)


def apply_logits_processors(logits: Logits, batch: SamplingBatch) -> Logits:
    """Call each row's own functions: (prompt_ids, output_ids, logits [vocab]) -> logits [vocab].

    Raises: InvalidTypeError if one returns something else; what they raise passes through.
    """
    for row in batch.processors:
        for processor in row.processors:
            before = logits[row.row]
            after = processor(list(row.prompt_token_ids), list(row.output_token_ids), before)
            if not isinstance(after, Tensor) or after.shape != before.shape:
                got = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
                raise InvalidTypeError(f"a logits processor must return logits of shape {tuple(before.shape)}, got {got}")
            logits[row.row] = after
    return logits


def apply_temperature(logits: Logits, batch: SamplingBatch) -> Logits:
    """Divide by the temperature: below 1 sharper, above 1 flatter.

    The maximum is taken off first, so that a tiny temperature drives the others to -inf and not the largest to +inf. A row
    at temperature 1 keeps its bits, whatever its neighbours ask for.
    Example: logits [2, 1, 0] at temperature 0.5 become [0, -2, -4].
    """
    if batch.temperature is None:
        return logits
    shift = torch.where(batch.temperature == 1.0, 0.0, logits.amax(dim=-1))  # [batch]
    return (logits - shift.unsqueeze(-1)) / batch.temperature.unsqueeze(-1)


def keep_min_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Drop tokens with p < min_p * p_max, so that a flat distribution keeps more tokens than a sharp one.

    Example: p = [.5, .3, .2], min_p = .5 keeps two (the bar is .25).
    Source: Nguyen et al. 2024, https://arxiv.org/abs/2407.01082
    """
    if batch.min_p is None:
        return logits
    # p / p_max = exp(logit - max): no sum is needed, and the bar is a difference of logits.
    ratio = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return logits.masked_fill(ratio < batch.min_p.unsqueeze(-1), float("-inf"))


def keep_top_k(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the k largest logits, and whatever ties with the k-th.

    Example: p = [.3, .2, .2, .2, .1], k = 2 keeps four: three tokens tie for the second place.
    """
    if batch.top_k is None:
        return logits
    is_on = batch.top_k < logits.shape[-1]
    k = torch.where(is_on, batch.top_k, 1)  # rows without top_k must not make topk sort the whole vocabulary
    largest = logits.topk(max(batch.max_top_k, 1), dim=-1).values  # [batch, largest k], in falling order
    kth = largest.gather(-1, k.unsqueeze(-1) - 1).squeeze(-1)  # [batch]
    bar = torch.where(is_on, kth, float("-inf"))
    return logits.masked_fill(logits < bar.unsqueeze(-1), float("-inf"))


def keep_top_p(logits: Logits, batch: SamplingBatch) -> Logits:
    """Keep the smallest set of tokens whose probabilities sum to at least top_p.

    Tokens enter by falling probability, equal ones by rising id. The token that crosses top_p is kept, so at least one
    always survives; at exact equality no further one is. Sums are of integer weights (draw.py), hence exact.
    Example: p = [.5, .3, .2], top_p = .6 keeps two; p = [.5, .25, .25], top_p = .5 keeps one.
    Source: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751
    """
    if batch.top_p is None:
        return logits
    return drop_beyond(logits, batch.top_p)


def drop_beyond(logits: Logits, top_p: Float[Tensor, " batch"], total: Int[Tensor, " batch"] | None = None) -> Logits:
    """Drop a token if the weights of those that go before it sum to top_p of the total, or more. total: by default of these."""
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = integer_weights(falling)
    running = weights.cumsum(dim=-1)
    before = running - weights  # what the larger ones sum to
    enough = top_p * (running[:, -1] if total is None else total)  # float64
    dropped = (before >= enough.unsqueeze(-1)) & (top_p < 1.0).unsqueeze(-1)
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), float("-inf"))


def _forbid(logits: Logits, entries: TokenEntries | None) -> Logits:
    if entries is not None:
        logits[entries.rows, entries.ids] = float("-inf")
    return logits
