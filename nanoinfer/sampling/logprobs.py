"""Log-probabilities told beside a token: its own, and those of the likeliest ids.

In: logits of some rows, the ids that were drawn (or that stand in the prompt), how many of the likeliest are wanted. Out:
TokenLogprobs, plain numbers. They are probabilities of all ids at temperature 1, unless the caller hands in processed logits.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.devices.transfer import on_device
from nanoinfer.outputs import TokenLogprobs


def token_logprobs(logits: Float[Tensor, "rows vocab"], token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """One for each row. num_top: how many of the likeliest ids, 0 .. vocab. logits: fp32.

    Example: p = [.5, .25, .25], token 2, num_top 1: ids [2, 0], values [log .25, log .5], ranks [3, 1].
    """
    logprobs = logits.log_softmax(dim=-1)
    tokens = on_device(torch.tensor(token_ids, dtype=torch.int64), logits.device).unsqueeze(-1)  # [rows, 1]
    groups = []
    for num in sorted(set(num_top)):  # rows that ask for as many go together; mostly these are all
        rows = [row for row, its_num in enumerate(num_top) if its_num == num]
        some = slice(None) if len(rows) == len(num_top) else on_device(torch.tensor(rows), logits.device)
        groups.append((rows, _token_and_likeliest(logprobs[some], tokens[some], num)))
    told: dict[int, TokenLogprobs] = {}
    for rows, columns in groups:  # read when everything has been launched: a GPU is waited for once
        told |= zip(rows, map(_without_repeat, *(column.tolist() for column in columns)), strict=True)
    return [told[row] for row in range(len(num_top))]


def _token_and_likeliest(
    logprobs: Float[Tensor, "rows vocab"], tokens: Int[Tensor, "rows 1"], num_top: int
) -> tuple[Int[Tensor, "rows told"], Float[Tensor, "rows told"], Int[Tensor, "rows told"]]:
    """Ids, values and ranks: each row's token, then its num_top likeliest, of which it may itself be one."""
    values = logprobs.gather(-1, tokens)
    ranks = (logprobs >= values).sum(dim=-1, keepdim=True)
    if num_top == 0:
        return tokens, values, ranks
    is_all = num_top == logprobs.shape[-1]
    top = logprobs.sort(dim=-1, descending=True, stable=True) if is_all else logprobs.topk(num_top, dim=-1)
    # Among the likeliest a rank is how many of them are as large; the smallest of them may tie with ids beyond.
    smallest = top.values[:, -1:]
    beyond = (logprobs >= smallest).sum(dim=-1, keepdim=True)
    rising = -top.values
    top_ranks = torch.searchsorted(rising, rising, right=True)
    top_ranks = torch.where(top.values == smallest, beyond, top_ranks)
    return torch.cat((tokens, top.indices), -1), torch.cat((values, top.values), -1), torch.cat((ranks, top_ranks), -1)


def _without_repeat(ids: list[int], values: list[float], ranks: list[int]) -> TokenLogprobs:
    """The token is told once, though it be one of the likeliest."""
    if ids.count(ids[0]) > 1:
        place = ids.index(ids[0], 1)
        for numbers in (ids, values, ranks):
            del numbers[place]
    return TokenLogprobs(ids, values, ranks)
