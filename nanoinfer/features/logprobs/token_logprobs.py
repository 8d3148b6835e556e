"""The log-probabilities returned with a token: its own, and those of the most probable ids or of given ids. And its mask.

In: logits of some rows, the ids that were drawn (or that are in the prompt), and a number of most probable ids, or ids.
Out: TokenLogprobs, plain numbers. The probabilities are those of all ids at temperature 1, unless the logits are processed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.outputs import Logprob, LogprobsOnePosition, TokenReport
from nanoinfer.sampling import exponentials
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import HeadRows, SampledTokens, Sampler
from nanoinfer.system.transfer import HostCopy, on_device
from nanoinfer.tokenization.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanoinfer.execution.local_executor import LocalExecutor

CACHED = 2**17  # numbers of which a processor's cache holds the exponentials

Rows = Float[Tensor, "rows vocab"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    ids[0] is the token itself. The other ids are the most likely ids except the token, in descending order, or those of
    SamplingParams.logprob_token_ids. Ranks are those of Logprob, and ties share the larger number.
    """

    ids: list[int]
    values: list[float]
    ranks: list[int]

    def with_texts(self, detokenizer: Detokenizer) -> LogprobsOnePosition:
        """Convert to what users get."""
        each = zip(self.ids, self.values, self.ranks, detokenizer.added_texts(self.ids), strict=True)
        return {token_id: Logprob(value, rank, text) for token_id, value, rank, text in each}


@dataclass(slots=True)
class RowReport(TokenReport):
    """What a request has asked for about one token. mask: the ids that could be drawn. None: not asked for."""

    logprobs: TokenLogprobs | None = None
    mask: list[int] | None = None

    def fields(self, detokenizer: Detokenizer) -> dict[str, object]:
        fields: dict[str, object] = {} if self.logprobs is None else {"logprobs": self.logprobs.with_texts(detokenizer)}
        return fields if self.mask is None else fields | {"sampling_mask": self.mask}


class ReportingSampler(Sampler):
    """Does what another sampler does, and reports log-probabilities and masks of the rows that ask for them."""

    def __init__(self, sampler: Sampler, logprobs_mode: str = "raw") -> None:
        """logprobs_mode: which log-probabilities are returned, or which logits instead, as EngineArgs says."""
        super().__init__(sampler.stages)
        self.sampler, self.may_be_late = sampler, sampler.may_be_late
        self._is_processed, self._as_logits = logprobs_mode.startswith("processed"), logprobs_mode.endswith("_logits")
        self._of_params: Mapping[str, Any] | None = None  # that of the last batch. It changes with the parameters of the rows
        self._with_logprobs: list[int] = []
        self._with_masks: list[int] = []

    def __call__(self, rows: HeadRows, batch: SamplingBatch) -> SampledTokens:
        if batch.of_params is not self._of_params:
            self._of_params = batch.of_params
            self._with_logprobs = [row for row, params in enumerate(batch.params) if params.logprobs is not None]
            self._with_masks = [row for row, params in enumerate(batch.params) if params.return_sampling_mask]
        with_logprobs, with_masks = self._with_logprobs, self._with_masks
        if not with_logprobs and not with_masks:
            return self.sampler(rows, batch)
        picked = on_device(torch.tensor(with_logprobs, dtype=torch.int64), rows.hidden.device)
        logits = rows.logits if self._is_processed else rows.logits[picked]  # a copy, before a stage writes into them
        needs_stages = with_masks or self._is_processed
        tokens = self.sampler.sample_by_stages(rows.logits, batch) if needs_stages else self.sampler(rows, batch)
        processed = rows.logits if tokens.logits is None else tokens.logits
        if self._is_processed:
            logits = processed[picked]

        asking = [batch.params[row] for row in with_logprobs]
        nums = [logits.shape[-1] if params.logprobs == -1 else params.logprobs or 0 for params in asking]
        given = [params.logprob_token_ids or () for params in asking]
        drawn = tokens.token_ids[picked].clamp(min=0)  # -1: no token
        find = launched_logprobs(logits, drawn, nums, given, as_logits=self._as_logits) if with_logprobs else list
        of_masks = on_device(torch.tensor(with_masks, dtype=torch.int64), rows.hidden.device)
        can_draw = HostCopy(processed[of_masks].isfinite()) if with_masks else None

        def report(token_ids: list[int]) -> dict[int, TokenReport]:
            """Make the reports. A row without a token gets none."""
            entries = dict(zip(with_logprobs, find(), strict=True))
            on_host = dict(zip(with_masks, can_draw.read()[0], strict=True)) if can_draw is not None else {}
            masks = {row: mask.nonzero().squeeze(-1).tolist() for row, mask in on_host.items()}
            return {row: RowReport(entries.get(row), masks.get(row)) for row in entries | masks if token_ids[row] >= 0}

        tokens.report = report
        return tokens


def report_by(executor: "LocalExecutor", logprobs_mode: str) -> None:
    """Let an executor's sampler make reports, from the first request on that asks for one."""
    if not isinstance(executor.sampler, ReportingSampler):
        executor.sampler = ReportingSampler(executor.sampler, logprobs_mode)


def token_logprobs(
    logits: Rows,
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
    on_same = on_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    return launched_logprobs(logits, on_same, num_top, given, as_logits=as_logits)()


def launched_logprobs(
    logits: Rows,
    token_ids: Int[Tensor, " rows"],
    num_top: list[int],
    given: Sequence[Sequence[int]] | None = None,
    *,
    as_logits: bool = False,
) -> Callable[[], list[TokenLogprobs]]:
    """Launch what token_logprobs computes, of ids that may be known to the device alone. Returns what waits for it.

    The device then goes on with other work, for which the result need not wait.
    """
    logprobs = logits if as_logits else log_softmax(logits)
    further = [*map(tuple, given or [()] * len(num_top))]
    kinds = [(num, len(ids)) for num, ids in zip(num_top, further, strict=True)]
    launched = []
    for kind in sorted(set(kinds)):  # rows with the same numbers are computed together. In most steps these are all rows
        rows = [row for row, row_kind in enumerate(kinds) if row_kind == kind]
        index = slice(None) if len(rows) == len(kinds) else on_device(torch.tensor(rows), logits.device)
        tokens = token_ids[index].unsqueeze(-1)
        if kind[1]:
            tokens = torch.cat((tokens, on_device(torch.tensor([further[row] for row in rows]), logits.device)), -1)
        launched.append((rows, HostCopy(*_listed_and_likeliest(logprobs[index], tokens, kind[0]))))

    def found() -> list[TokenLogprobs]:
        entries: dict[int, TokenLogprobs] = {}
        for rows, columns in launched:
            entries |= zip(rows, map(_without_repeats, *(column.tolist() for column in columns.read())), strict=True)
        return [entries[row] for row in range(len(num_top))]

    return found


def _listed_and_likeliest(
    logprobs: Rows, tokens: Int[Tensor, "rows listed"], num_top: int
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


def log_softmax(logits: Rows) -> Rows:
    """Compute the log-probabilities: logit - largest - log(total of exponentials)."""
    if logits.device.type != "cpu":
        return logits.log_softmax(dim=-1)
    below = logits - logits.amax(dim=-1, keepdim=True)
    parts = below.split(max(CACHED // logits.shape[-1], 1))
    total = torch.cat([exponentials.on_cpu(part, exponentials.table(40)).sum(dim=-1, keepdim=True) for part in parts]).double()
    mantissa, exponent = torch.frexp(total)
    s = (2 * mantissa - 1) / (2 * mantissa + 1)  # log(2 * mantissa) = 2 * atanh(s), a series, and s <= 1 / 3
    series = torch.zeros_like(s)
    for i in range(23, 0, -2):
        series = series * (s * s) + 1 / i
    return below.sub_((2 * s * series + (exponent - 41) * exponentials.LOG2).float())
