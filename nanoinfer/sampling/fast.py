"""The same tokens as the plain stages give, sooner: most rows are decided by a few of their logits.

In: logits after every stage before the temperature. Out: a token id per row, always the one that the last four stages and
draw.draw would give: they run here, too, on fewer columns. That is exact, not nearly so, for four reasons: columns stay in
the order of their ids, so ties fall alike; what is left out was dropped or is counted in the total; sums are of integers; and
torch's exp gives a number the same bits wherever it stands (tests/test_fast.py holds it to that).

    row has top_k    the k + 32 largest logits are enough, unless more than those tie with the k-th
    only top_p       the 256 largest are enough, if those above the smallest of them reach top_p of the total weight
    neither          every token may be drawn: weights of all, but no sort

On a GPU it is dear to ask for a value, and cheap to go over all logits: a threshold is found by bisection there.

A row for which the few were not enough takes the plain way. (With bf16 logits ties are the rule: over 50,257 of them the 40th
largest tied with the 41st in 64% of rows.)
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.devices.transfer import on_device
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import draw, integer_weights

LAST_STAGES = (stages.apply_temperature, stages.keep_min_p, stages.keep_top_k, stages.keep_top_p)
TIE_MARGIN = 32  # columns beyond the k-th, for what ties with it
NUM_TRIED = 256  # largest logits that top_p looks at before it sorts them all
SCRATCH_BYTES = 2**20  # on a CPU full rows are weighed a few at a time, so that what one pass writes the next finds in cache
HAND_SIZE = 8  # of _ids_of_largest
NUM_PARTS = 64  # of _first_largest
BLOCK = 512  # ids whose weights are summed before the ruler is searched

Logits = Float[Tensor, "batch vocab"]
Ids = Int[Tensor, " batch"]
Largest = Float[Tensor, " batch"]  # of each row's logits; not finite where no token can be drawn


def sample(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """One token id per row, greedy or drawn. A row whose largest logit is not finite gets some id, to be replaced."""
    if batch.all_greedy:
        return _first_largest(logits)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    largest = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    if batch.greedy_rows:
        rows = on_device(torch.tensor(batch.greedy_rows), logits.device)
        token_ids[rows], largest[rows] = _first_largest(logits[rows])
    ways: tuple[tuple[tuple[int, ...], Callable[[Logits, SamplingBatch], tuple[Ids, Largest]]], ...] = (
        (batch.top_k_rows, _sample_top_k),
        (batch.top_p_rows, _sample_top_p),
        (batch.other_rows, _sample_other),
    )
    if not may_ask(logits):
        ways = ((tuple(sorted(batch.top_k_rows + batch.top_p_rows + batch.other_rows)), _sample_by_threshold),)
    for row_numbers, way in ways:
        if len(row_numbers) == len(logits):  # the usual step: everybody asks for the same
            return way(logits, batch)
        if row_numbers:
            rows = on_device(torch.tensor(row_numbers), logits.device)
            token_ids[rows], largest[rows] = way(logits[rows], batch.only_rows(rows))
    return token_ids, largest


def may_ask(logits: Logits) -> bool:
    """May the next thing to do depend on a value of these? On a GPU, reading one waits for all that it has been given."""
    return not logits.is_cuda


def sample_both_ways(logits: Logits, batch: SamplingBatch) -> Ids:
    """Every row greedily, and unless all are greedy drawn as well: the same launches whatever the values, to be recorded.

    -1 for a row whose largest logit is not finite.
    """
    token_ids, largest = _first_largest(logits)
    if not batch.all_greedy:
        drawn, _ = _sample_by_threshold(logits, batch)
        token_ids = drawn if batch.greedy is None else torch.where(batch.greedy, token_ids, drawn)
    return torch.where(largest.isfinite(), token_ids, -1)


def sample_plainly(logits: Logits, batch: SamplingBatch) -> Ids:
    """The definition: the last four stages, and the draw."""
    for stage in LAST_STAGES:
        logits = stage(logits, batch)
    return draw(logits, batch.u)


def _sample_top_k(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """All in [batch, k + margin]: the temperature keeps the order, so the k-th largest stays the k-th largest."""
    assert batch.top_k is not None
    vocab_size = logits.shape[-1]
    num_columns = min(batch.max_top_k + TIE_MARGIN, vocab_size)
    few, ids = _largest(logits, num_columns)
    kept = stages.keep_top_k(stages.keep_min_p(stages.apply_temperature(few, batch), batch), batch)
    token_ids = _pick(ids, draw(stages.keep_top_p(kept, batch), batch.u))
    if num_columns < vocab_size:  # were all that tie with the k-th among the few? Then something was smaller, and dropped.
        token_ids = _plainly_where(kept.amin(dim=-1) > float("-inf"), token_ids, logits, batch)
    return token_ids, few.amax(dim=-1)


def _sample_top_p(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """The largest few, and the weight of all."""
    assert batch.top_p is not None
    total = torch.cat([weights.sum(dim=-1) for weights, _ in _weights(logits, batch)])  # [batch]
    few, ids = _largest(logits, min(NUM_TRIED, logits.shape[-1]))
    scaled = stages.apply_temperature(few, batch)
    kept = stages.drop_beyond(scaled, batch.top_p, total)  # what min_p drops is not in the total, and comes after it
    token_ids = _pick(ids, draw(kept, batch.u))
    if few.shape[-1] < logits.shape[-1]:
        # Which of the tokens that tie with the smallest are among the few is chance, so those above must be enough.
        above = scaled > scaled.amin(dim=-1, keepdim=True)
        reached = (integer_weights(scaled) * above).sum(dim=-1)
        token_ids = _plainly_where(reached < batch.top_p * total, token_ids, logits, batch)
    return token_ids, few.amax(dim=-1)


def _sample_other(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Any token may be drawn. The ruler is searched in two steps: in which block of ids the mark lies, then where in it."""
    return torch.cat([_draw_in_two(weights, batch.u[rows]) for weights, rows in _weights(logits, batch)]), logits.amax(dim=-1)


def _draw_in_two(weights: Int[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Ids:
    """draw.draw of these weights."""
    blocks = F.pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))  # [batch, num_blocks, BLOCK]
    sums = blocks.sum(dim=-1)
    running = sums.cumsum(dim=-1)
    total = running[:, -1]
    mark = torch.minimum((u * total).floor().to(torch.int64), total - 1).unsqueeze(-1)
    block = torch.searchsorted(running, mark, right=True).clamp_(max=sums.shape[-1] - 1)  # clamped for a row of zeros
    before = (running - sums).gather(-1, block)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=-1)
    return (block * BLOCK + torch.searchsorted(inside, mark - before, right=True)).squeeze(-1)


def _sample_by_threshold(logits: Logits, batch: SamplingBatch) -> tuple[Ids, Largest]:
    """Any row, without a sort, and without a question that the host would have to answer: for a GPU."""
    kept = stages.keep_top_k(stages.keep_min_p(stages.apply_temperature(logits, batch), batch), batch)
    weights = integer_weights(kept)
    if batch.top_p is not None:
        weights = weights.masked_fill(_beyond(kept, weights, batch.top_p), 0)
    return _draw_in_two(weights, batch.u), logits.amax(dim=-1)


def _beyond(logits: Logits, weights: Int[Tensor, "batch vocab"], top_p: Float[Tensor, " batch"]) -> Bool[Tensor, "batch vocab"]:
    """What stages.drop_beyond drops, by bisection: the largest logit such that it and those above it weigh top_p of the total.

    The bits of a float, read as an integer, are in its order, if those of negative ones are flipped: 32 halvings find any.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    enough = top_p * weights.sum(dim=-1)  # float64
    low = torch.full_like(enough, -(2**31), dtype=torch.int64)
    high = torch.full_like(enough, 2**31 - 1, dtype=torch.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        is_enough = (weights * (keys >= middle.unsqueeze(-1))).sum(dim=-1) >= enough
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle - 1)
    threshold = low.unsqueeze(-1)
    above = (weights * (keys > threshold)).sum(dim=-1, keepdim=True)
    ties = keys == threshold  # they enter by rising id
    before = above + (ties.cumsum(dim=-1) - 1) * (weights * ties).amax(dim=-1, keepdim=True)
    dropped = (keys < threshold) | (ties & (before >= enough.unsqueeze(-1)))
    return dropped & (top_p < 1.0).unsqueeze(-1)


def _first_largest(logits: Logits) -> tuple[Ids, Largest]:
    """argmax and maximum: of equal maxima the lowest id. The part of the row that holds it is found first.

    A maximum alone can be taken of many numbers at once, where its place has to be looked for one by one (5 times as long).
    """
    width = max(logits.shape[-1] // NUM_PARTS, 1)
    num_whole = logits.shape[-1] // width
    maxima = logits[:, : num_whole * width].unflatten(-1, (num_whole, width)).amax(dim=-1)  # [batch, num_whole]
    if rest := logits.shape[-1] - num_whole * width:
        maxima = torch.cat((maxima, logits[:, -rest:].amax(dim=-1, keepdim=True)), dim=-1)
    largest, part = maxima.max(dim=-1)
    ids = part.unsqueeze(-1) * width + torch.arange(max(width, rest), device=logits.device)  # one part of each row
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    return ids.gather(-1, logits.gather(-1, ids).argmax(dim=-1, keepdim=True)).squeeze(-1), largest


def _largest(logits: Logits, num_columns: int) -> tuple[Float[Tensor, "batch few"], Int[Tensor, "batch few"]]:
    """The largest logits of each row with their ids, in the order of the ids."""
    if num_columns == logits.shape[-1]:
        return logits, torch.arange(num_columns, device=logits.device).expand_as(logits)
    ids = _ids_of_largest(logits, num_columns).sort(dim=-1).values
    return logits.gather(-1, ids), ids


def _ids_of_largest(logits: Logits, num_columns: int) -> Int[Tensor, "batch few"]:
    """In any order. Deal the ids out to hands: the hands with the largest best cards hold all of the largest logits.

    (A logit in another hand has num_columns best cards above it, or equal to it.) Which hands these are is the same question
    over fewer numbers, and is answered in the same way.
    """
    vocab_size = logits.shape[-1]
    num_hands = vocab_size // HAND_SIZE
    if num_hands < 2 * num_columns:
        return logits.topk(num_columns, dim=-1, sorted=False).indices
    num_dealt = num_hands * HAND_SIZE
    best_cards = logits[:, :num_dealt].unflatten(-1, (HAND_SIZE, num_hands)).amax(dim=1)  # [batch, num_hands]
    hands = _ids_of_largest(best_cards, num_columns)  # [batch, few]
    deal = torch.arange(0, num_dealt, num_hands, device=logits.device)  # hand h holds the ids h, h + num_hands, ...
    ids = (hands.unsqueeze(-1) + deal).flatten(1)  # [batch, few * HAND_SIZE]
    if num_dealt < vocab_size:
        rest = torch.arange(num_dealt, vocab_size, device=logits.device).expand(len(logits), -1)
        ids = torch.cat((ids, rest), dim=-1)
    return ids.gather(-1, logits.gather(-1, ids).topk(num_columns, dim=-1, sorted=False).indices)


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
