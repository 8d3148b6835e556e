"""Compute the last four stages and the draw in less time: a few logits decide most rows.

In: logits after every stage before the temperature. Out: a token id per row, always the one that the last four stages and
draw.draw give. The same stages run here, on fewer columns. The result is exact for four reasons. Columns stay in the order of
their ids, so ties are broken alike. Every column left out was dropped or is counted in the total. Sums are of integers. A
number's weight does not depend on its place.

    row has top_k    the k + 32 largest logits are enough, unless more tie with the k-th
    row has min_p    the 256 largest are enough, if min_p drops the smallest of them
    only top_p       the 256 largest are enough, if those above the smallest reach top_p of the total weight
    neither          every token may be drawn: all weights are computed, but not sorted

A row that these logits do not decide runs the plain stages. (With bf16 logits ties are the rule: over 50,257 of them the 40th
largest tied with the 41st in 64% of rows.)

On a GPU, kernels that need not wait for the host do the same (cuda/draw_kernel.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.fast.sampling.kernels import draw_from_all, find_largest, has_kernels
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import ParameterColumns, SamplingBatch
from nanoinfer.sampling.draw import draw, integer_weights
from nanoinfer.sampling.routes import Route
from nanoinfer.sampling.sampler import HeadRows
from nanoinfer.system.transfer import on_device

if TYPE_CHECKING:
    from nanoinfer.fast.cpu.screen import ScreenedLinear
    from nanoinfer.fast.cuda.draw_kernel import Uniform

TIE_MARGIN = 32  # further columns for ids that tie with the k-th
NUM_TRIED = 256  # the number of largest logits that top_p reads before it sorts all

Logits = Float[Tensor, "batch vocab"]
Ids = Int[Tensor, " batch"]
Candidates = Float[Tensor, "batch sections columns"]  # the largest logits of each section of a row, in the order of the ids
CandidateIds = Int[Tensor, "batch sections columns"]
Largest = Float[Tensor, " batch"]  # the largest of each row's logits. It is not finite if no token can be drawn


@dataclass(eq=False)
class FewLogits(Route):
    """The route that uses these functions. It supports every step."""

    # Computes the largest logits of a few rows in less time than all logits. None: the model has no such head
    head: "ScreenedLinear | None" = None
    # The function that computes all logits of this head. Rows of a drafter have another one
    all_logits: Callable[[Tensor], Tensor] | None = None

    def try_sample(self, rows: HeadRows, batch: SamplingBatch) -> Ids:
        k = max(batch.max_top_k, 1)
        needs_all = batch.row_groups.top_p_rows or batch.row_groups.other_rows
        if not rows.is_raw:
            logits = rows.logits
        elif self.head is not None and rows.head == self.all_logits and self.head.pays(len(rows.hidden), k) and not needs_all:
            logits = self.head.largest_logits(rows.hidden, k)
        else:
            logits = rows.head(rows.hidden)  # a kernel reads bf16 in half the time
        if logits.device.type != "cpu":
            return sample_on_gpu(logits, batch, None if batch.row_groups.all_greedy else batch.u)
        if not has_kernels("cpu", logits.dtype) or logits.dtype == torch.float64:  # the stages' argmax is of rounded logits
            logits = logits.float()
        token_ids, largest = sample(logits, batch)
        return torch.where(largest.isfinite(), token_ids, -1)


def sample(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Choose a token id per row, greedily or by the draw. A row whose largest logit is not finite gets an arbitrary id."""
    groups = batch.row_groups
    if groups.all_greedy:
        return first_largest(logits)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    largest = torch.empty(len(logits), device=logits.device)
    if groups.greedy_rows:
        rows = on_device(torch.tensor(groups.greedy_rows), logits.device)
        token_ids[rows], largest[rows] = first_largest(logits[rows])
    routes: tuple[tuple[tuple[int, ...], Callable[[Logits, SamplingBatch], tuple[Ids, Largest]]], ...]
    if has_kernels(logits.device.type, logits.dtype):
        with_min_p = set() if batch.min_p is None else set(batch.min_p.nonzero().flatten().tolist())
        routes = (
            (tuple(sorted({*groups.top_k_rows, *with_min_p})), _sample_few),
            (tuple(row for row in groups.top_p_rows if row not in with_min_p), _sample_top_p),
            (tuple(row for row in groups.other_rows if row not in with_min_p), _sample_other),
        )
    else:
        routes = ((tuple(sorted(groups.top_k_rows + groups.top_p_rows + groups.other_rows)), _sample_by_stages),)
    for row_numbers, route in routes:
        if len(row_numbers) == len(logits):  # the usual step: all rows need the same
            return route(logits, batch)
        if row_numbers:
            rows = on_device(torch.tensor(row_numbers), logits.device)
            token_ids[rows], largest[rows] = route(logits[rows], batch.only_rows(rows))
    return token_ids, largest


def sample_plainly(logits: Logits, batch: SamplingBatch) -> Ids:
    """Run the last four stages and the draw, which are the definition."""
    logits = logits.float()
    for stage in stages.STAGES_FROM_TEMPERATURE:
        logits = stage(logits, batch)
    return draw(logits, batch.u)


def _sample_by_stages(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    return sample_plainly(logits, batch), logits.amax(dim=-1)


def _sample_few(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Draw from [batch, k + margin] logits. The temperature keeps their order, so the k-th largest stays the k-th largest."""
    num_columns = max(batch.max_top_k + TIE_MARGIN, 0 if batch.min_p is None else NUM_TRIED)
    num_columns = min(num_columns, logits.shape[-1])
    candidates, ids = largest_columns(logits, num_columns)
    token_ids, is_undecided = decide_few(candidates.unsqueeze(1), ids.unsqueeze(1), batch)
    if num_columns < logits.shape[-1]:
        token_ids = _plainly_where(is_undecided, token_ids, logits, batch)
    return token_ids, candidates.amax(dim=-1)


def decide_few(candidates: Candidates, ids: CandidateIds, batch: SamplingBatch) -> tuple[Ids, Bool[Tensor, " batch"]]:
    """Draw from the largest logits of each section of the rows, k + margin of each.

    Returns:
        The token ids, and which rows the candidates do not decide, if a section has further ids. If a candidate of a section is
        dropped, every id of the section that ties with the k-th largest logit is a candidate.
    """
    scaled = stages.apply_temperature(candidates.flatten(1), batch)
    kept = stages.keep_top_k(stages.keep_min_p(scaled, batch), batch)
    token_ids = _pick(ids.flatten(1), draw(stages.keep_top_p(kept, batch), batch.u))
    return token_ids, (kept.view_as(candidates).amin(dim=-1) > float("-inf")).any(dim=-1)


def _sample_top_p(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Draw from the largest logits and the total weight of all logits."""
    candidates, ids = largest_columns(logits, min(NUM_TRIED, logits.shape[-1]))
    largest = candidates.amax(dim=-1)
    _, totals = draw_from_all(logits, largest, batch)
    token_ids, is_undecided = decide_top_p(candidates.unsqueeze(1), ids.unsqueeze(1), totals, batch)
    return _plainly_where(is_undecided, token_ids, logits, batch), largest


def decide_top_p(
    candidates: Candidates, ids: CandidateIds, totals: Int[Tensor, " batch"], batch: SamplingBatch
) -> tuple[Ids, Bool[Tensor, " batch"]]:
    """Draw from the largest logits of each section of the rows. totals: the weight of what min_p keeps.

    Returns:
        The token ids, and which rows the candidates do not decide. Which ids that tie with the smallest candidate of a section
        are candidates is arbitrary, so the larger candidates must be enough.
    """
    assert batch.top_p is not None
    scaled = stages.apply_temperature(candidates.flatten(1), batch)
    token_ids = _pick(ids.flatten(1), draw(stages.drop_beyond(scaled, batch.top_p, totals), batch.u))
    above = scaled > scaled.view_as(candidates).amin(dim=-1).amax(dim=-1, keepdim=True)
    return token_ids, (integer_weights(scaled) * above).sum(dim=-1) < batch.top_p * totals


def _sample_other(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Draw from all weights, because every token may be drawn."""
    _, largest = first_largest(logits)
    token_ids, _ = draw_from_all(logits, largest, batch)
    return token_ids, largest


def sample_on_gpu(logits: Logits, columns: ParameterColumns, u: "Uniform | None") -> Ids:
    """Choose a token id per row by kernels, without a value that the host must read: see draw_kernel.choose."""
    from nanoinfer.fast.cuda.draw_kernel import choose  # needs Triton

    return choose(logits, columns, u)


def first_largest(logits: Logits) -> tuple[Ids, Largest]:
    """Find argmax and maximum, with the lowest id of equal maxima."""
    if has_kernels(logits.device.type, logits.dtype):
        largest, ids = find_largest(logits, 1)
        return ids.squeeze(-1), largest.squeeze(-1)
    largest, ids = logits.max(dim=-1)
    return ids, largest


def largest_columns(logits: Logits, num_columns: int) -> tuple[Float[Tensor, "batch columns"], Int[Tensor, "batch columns"]]:
    """Return the largest logits of each row in fp32 with their ids, in the order of the ids."""
    if has_kernels(logits.device.type, logits.dtype):
        return find_largest(logits, num_columns)
    ids = logits.topk(num_columns, dim=-1, sorted=False).indices.sort(dim=-1).values
    return logits.gather(-1, ids).float(), ids


def _pick(ids: Tensor, columns: Ids) -> Ids:
    """Return the ids in the drawn columns, clamped, since a row of NaNs draws no column."""
    return ids.gather(-1, columns.clamp(max=ids.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


def _plainly_where(is_undecided: Bool[Tensor, " batch"], token_ids: Ids, logits: Logits, batch: SamplingBatch) -> Ids:
    """Run the plain stages on the rows that the candidates do not decide."""
    rows = is_undecided.nonzero().squeeze(-1)
    if len(rows):
        token_ids = token_ids.index_copy(0, rows, sample_plainly(logits[rows], batch.only_rows(rows)))
    return token_ids
