"""Log-probabilities told beside a token: its own, and those of the likeliest ids.

In: logits of some rows, the ids that were drawn (or that stand in the prompt), how many of the likeliest are wanted. Out:
TokenLogprobs, plain numbers. They are probabilities of all ids at temperature 1, unless the caller hands in processed logits.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """ids[0] is the token itself, then the likeliest ids but for itself, in falling order; one value and rank for each.

    ranks: how many ids are as likely or likelier, so 1 is the likeliest and equal ones share the larger number.
    """

    ids: list[int]
    values: list[float]
    ranks: list[int]


def token_logprobs(logits: Float[Tensor, "rows vocab"], token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """One for each row. num_top: how many of the likeliest ids, 0 .. vocab. logits: fp32.

    Example: p = [.5, .25, .25], token 2, num_top 1: ids [2, 0], values [log .25, log .5], ranks [3, 1].
    """
    logprobs = logits.log_softmax(dim=-1)
    return [_one(row, token_id, num) for row, token_id, num in zip(logprobs, token_ids, num_top, strict=True)]


def _one(logprobs: Float[Tensor, "vocab"], token_id: int, num_top: int) -> TokenLogprobs:
    top = logprobs.sort(descending=True, stable=True) if num_top == len(logprobs) else logprobs.topk(num_top)
    others = top.indices != token_id
    ids = torch.cat((torch.tensor([token_id], device=logprobs.device), top.indices[others]))
    values = logprobs[ids]
    # Among the likeliest a rank is how many of them are as large; the smallest of them may tie with ids beyond.
    ranks = torch.searchsorted(-top.values, -values, right=True)
    smallest = top.values[-1] if num_top else torch.inf
    beyond = torch.tensor([int((logprobs >= values[0]).sum()), int((logprobs >= smallest).sum())], device=logprobs.device)
    ranks = torch.where(values <= smallest, beyond[1], ranks)
    ranks[0] = beyond[0]
    return TokenLogprobs(ids.tolist(), values.tolist(), ranks.tolist())
