"""The same tokens as the plain stages give, sooner: most rows are decided by a few of their logits.

In: logits after every stage before the temperature. Out: a token id per row, always the one that the last four stages and
draw.draw would give: they run here, too, on fewer columns. That is exact, not nearly so, for four reasons: columns stay in
the order of their ids, so ties fall alike; what is left out was dropped or is counted in the total; sums are of integers; and
torch's exp gives a number the same bits wherever it stands (tests/test_fast.py holds it to that).

    row has top_k    the k + 32 largest logits are enough, unless more than those tie with the k-th
    only top_p       the 256 largest are enough, if those above the smallest of them reach top_p of the total weight
    neither          every token may be drawn: weights of all, but no sort

A row for which the few were not enough takes the plain way. (With bf16 logits ties are the rule: over 50,257 of them the 40th
largest tied with the 41st in 64% of rows.)
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import draw, integer_weights, uniform

LAST_STAGES = (stages.apply_temperature, stages.keep_min_p, stages.keep_top_k, stages.keep_top_p)
TIE_MARGIN = 32  # columns beyond the k-th, for what ties with it
NUM_TRIED = 256  # largest logits that top_p looks at before it sorts them all
SCRATCH_BYTES = 2**20  # on a CPU full rows are weighed a few at a time, so that what one pass writes the next finds in cache
BLOCK = 512  # ids whose weights are summed before the ruler is searched

Logits = Float[Tensor, "batch vocab"]
Ids = Int[Tensor, "batch"]
Largest = Float[Tensor, "batch"]  # of each row's logits; not finite where no token can be drawn


def sample(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """One token id per row, greedy or drawn. A row whose largest logit is not finite gets some id, to be replaced."""
    if batch.all_greedy:
        largest, token_ids = logits.max(dim=-1)  # the first of equal maxima
        return token_ids, largest
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    largest = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    if batch.greedy_rows:
        rows = torch.tensor(batch.greedy_rows, device=logits.device)
        largest[rows], token_ids[rows] = logits[rows].max(dim=-1)
    for row_numbers, way in (
        (batch.top_k_rows, _sample_top_k),
        (batch.top_p_rows, _sample_top_p),
        (batch.other_rows, _sample_other),
    ):
        if len(row_numbers) == len(logits):  # the usual step: everybody asks for the same
            return way(logits, batch)
        if row_numbers:
            rows = torch.tensor(row_numbers, device=logits.device)
            token_ids[rows], largest[rows] = way(logits[rows], batch.only_rows(rows))
    return token_ids, largest


def sample_plainly(logits: Logits, batch: SamplingBatch) -> Ids:
    """The definition: the last four stages, and the draw."""
    for stage in LAST_STAGES:
        logits = stage(logits, batch)
    return draw(logits, uniform(batch.seeds, batch.positions))


def _sample_top_k(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """All in [batch, k + margin]: the temperature keeps the order, so the k-th largest stays the k-th largest."""
    assert batch.top_k is not None
    vocab_size = logits.shape[-1]
    num_columns = min(batch.max_top_k + TIE_MARGIN, vocab_size)
    few, ids = _largest(logits, num_columns)
    scaled = stages.apply_temperature(few, batch)
    kept = stages.keep_top_k(stages.keep_min_p(scaled, batch), batch)
    token_ids = _pick(ids, draw(stages.keep_top_p(kept, batch), uniform(batch.seeds, batch.positions)))
    if num_columns < vocab_size:  # were all that tie with the k-th among the few? Then a column that is smaller was, too.
        kth = scaled.topk(batch.max_top_k, dim=-1).values.gather(-1, batch.top_k.unsqueeze(-1) - 1).squeeze(-1)
        token_ids = _plainly_where((scaled.amin(dim=-1) >= kth) & kth.isfinite(), token_ids, logits, batch)
    return token_ids, few.amax(dim=-1)


def _sample_top_p(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """The largest few, and the weight of all."""
    assert batch.top_p is not None
    total = torch.cat([weights.sum(dim=-1) for weights, _ in _weights(logits, batch)])  # [batch]
    few, ids = _largest(logits, min(NUM_TRIED, logits.shape[-1]))
    scaled = stages.apply_temperature(few, batch)
    kept = stages.drop_beyond(scaled, batch.top_p, total)  # what min_p drops is not in the total, and comes after it
    token_ids = _pick(ids, draw(kept, uniform(batch.seeds, batch.positions)))
    if few.shape[-1] < logits.shape[-1]:
        # Which of the tokens that tie with the smallest are among the few is chance, so those above must be enough.
        above = scaled > scaled.amin(dim=-1, keepdim=True)
        reached = (integer_weights(scaled) * above).sum(dim=-1)
        token_ids = _plainly_where(reached < batch.top_p * total, token_ids, logits, batch)
    return token_ids, few.amax(dim=-1)


def _sample_other(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Any token may be drawn. The ruler is searched in two steps: in which block of ids the mark lies, then where in it."""
    u = uniform(batch.seeds, batch.positions)
    token_ids = []
    for weights, rows in _weights(logits, batch):
        blocks = F.pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))  # [rows, num_blocks, BLOCK]
        sums = blocks.sum(dim=-1)
        running = sums.cumsum(dim=-1)
        total = running[:, -1]
        mark = torch.minimum((u[rows] * total).floor().to(torch.int64), total - 1).unsqueeze(-1)
        block = torch.searchsorted(running, mark, right=True).clamp_(max=sums.shape[-1] - 1)  # clamped for a row of zeros
        before = (running - sums).gather(-1, block)
        inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=-1)
        token_ids.append((block * BLOCK + torch.searchsorted(inside, mark - before, right=True)).squeeze(-1))
    return torch.cat(token_ids), logits.amax(dim=-1)


def _largest(logits: Logits, num_columns: int) -> tuple[Float[Tensor, "batch few"], Int[Tensor, "batch few"]]:
    """The largest logits of each row with their ids, in the order of the ids."""
    if num_columns == logits.shape[-1]:
        return logits, torch.arange(num_columns, device=logits.device).expand_as(logits)
    ids = logits.topk(num_columns, dim=-1, sorted=False).indices.sort(dim=-1).values
    return logits.gather(-1, ids), ids


def _weights(logits: Logits, batch: SamplingBatch) -> Iterator[tuple[Tensor, slice]]:
    """draw.integer_weights [rows, vocab] of full rows after temperature and min_p, some rows at a time; and which rows."""
    num_at_a_time = max(SCRATCH_BYTES // (logits.shape[-1] * 4), 1) if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), num_at_a_time):
        rows = slice(start, start + num_at_a_time)
        part = batch.only_rows(rows)
        yield integer_weights(stages.keep_min_p(stages.apply_temperature(logits[rows], part), part)), rows


def _pick(ids: Tensor, columns: Ids) -> Ids:
    """The ids in the drawn columns. Clamped, since a row of NaNs draws no column."""
    return ids.gather(-1, columns.clamp(max=ids.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


def _plainly_where(is_open: Tensor, token_ids: Ids, logits: Logits, batch: SamplingBatch) -> Ids:
    """Decide the rows that the few did not decide."""
    rows = is_open.nonzero().squeeze(-1)
    if len(rows):
        token_ids = token_ids.index_copy(0, rows, sample_plainly(logits[rows], batch.only_rows(rows)))
    return token_ids
