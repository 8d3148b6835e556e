"""What is done to the logits before the draw: pure functions, in the order of sampler.STAGES.

Each takes logits [batch, vocab] in fp32 and the batch, and returns logits; -inf is "cannot be drawn". A stage never lets a
dropped token back in, and treats every row as if it were alone. A row in which nothing is left may turn into NaNs on its way;
the sampler notices at the end. Probabilities are written p = softmax(logits).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import integer_weights

Logits = Float[Tensor, "batch vocab"]


def mask_min_tokens(logits: Logits, batch: SamplingBatch) -> Logits:
    """Forbid EOS and stop ids in rows that have fewer than min_tokens tokens out."""
    if batch.banned_rows is None:
        return logits
    return logits.index_put((batch.banned_rows, batch.banned_ids), torch.tensor(float("-inf"), device=logits.device))


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
    largest = logits.topk(int(k.max()), dim=-1).values  # [batch, largest k], in falling order
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
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = integer_weights(falling)
    before = weights.cumsum(dim=-1) - weights  # what the larger ones sum to
    enough = batch.top_p.unsqueeze(-1) * weights.sum(dim=-1, keepdim=True)  # float64
    dropped = (before >= enough) & (batch.top_p < 1.0).unsqueeze(-1)
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), float("-inf"))
