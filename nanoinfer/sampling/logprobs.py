"""The log-probabilities returned with a token: its own, and those of the most probable ids or of given ids.

In: logits of some rows, the ids that were drawn (or that are in the prompt), and a number of most probable ids, or ids.
Out: TokenLogprobs, plain numbers. The probabilities are those of all ids at temperature 1, unless the logits are processed.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.outputs import TokenLogprobs
from nanoinfer.sampling.exponentials import log_softmax
from nanoinfer.system.transfer import on_device


def token_logprobs(
    logits: Float[Tensor, "rows vocab"],
    token_ids: list[int],
    num_top: list[int],
    given: Sequence[Sequence[int]] | None = None,
    *,
    as_logits: bool = False,
) -> list[TokenLogprobs]:
    """Compute the log-probabilities of each row.

    Example: p = [.5, .25, .25], token 2, num_top 1: ids [2, 0], values [log .25, log .5], ranks [3, 1].

    Args:
        logits: the logits of the rows, in fp32.
        num_top: for each row, the number of most probable ids to return, 0 .. vocab.
        given: for each row, further ids to return. None: no row has any.
        as_logits: whether to return the logits instead of log-probabilities.
    """
    logprobs = logits if as_logits else log_softmax(logits)
    listed = [[token_id, *ids] for token_id, ids in zip(token_ids, given or [()] * len(token_ids), strict=True)]
    kinds = [(num, len(ids)) for num, ids in zip(num_top, listed, strict=True)]
    launched = []
    for kind in sorted(set(kinds)):  # rows with the same numbers are computed together. In most steps these are all rows
        rows = [row for row, row_kind in enumerate(kinds) if row_kind == kind]
        index = slice(None) if len(rows) == len(kinds) else on_device(torch.tensor(rows), logits.device)
        tokens = on_device(torch.tensor([listed[row] for row in rows], dtype=torch.int64), logits.device)
        launched.append((rows, _listed_and_likeliest(logprobs[index], tokens, kind[0])))
    entries: dict[int, TokenLogprobs] = {}
    for rows, columns in launched:  # read when all are launched, so that the host waits for a GPU only once
        entries |= zip(rows, map(_without_repeats, *(column.tolist() for column in columns)), strict=True)
    return [entries[row] for row in range(len(num_top))]


def _listed_and_likeliest(
    logprobs: Float[Tensor, "rows vocab"], tokens: Int[Tensor, "rows listed"], num_top: int
) -> tuple[Int[Tensor, "rows columns"], Float[Tensor, "rows columns"], Int[Tensor, "rows columns"]]:
    """Return ids, values and ranks of each row's tokens and of its num_top most probable ids, which may include a token."""
    values = logprobs.gather(-1, tokens)
    ranks = torch.stack([(logprobs >= value.unsqueeze(-1)).sum(dim=-1) for value in values.unbind(-1)], dim=-1)
    if num_top == 0:
        return tokens, values, ranks
    is_all = num_top == logprobs.shape[-1]
    top = logprobs.sort(dim=-1, descending=True, stable=True) if is_all else logprobs.topk(num_top, dim=-1)
    # The rank of a top id is the number of top ids at least as large. Only the smallest may tie with ids outside the top.
    smallest = top.values[:, -1:]
    smallest_rank = (logprobs >= smallest).sum(dim=-1, keepdim=True)
    rising = -top.values
    top_ranks = torch.searchsorted(rising, rising, right=True)
    top_ranks = torch.where(top.values == smallest, smallest_rank, top_ranks)
    return torch.cat((tokens, top.indices), -1), torch.cat((values, top.values), -1), torch.cat((ranks, top_ranks), -1)


def _without_repeats(ids: list[int], values: list[float], ranks: list[int]) -> TokenLogprobs:
    """Keep the first entry of each id. The token may be among the most probable ids, too."""
    first = sorted(dict(zip(reversed(ids), reversed(range(len(ids))), strict=True)).values())
    return TokenLogprobs([ids[i] for i in first], [values[i] for i in first], [ranks[i] for i in first])
