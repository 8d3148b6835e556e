"""Triton kernels of the draw: a GPU computes token ids from the logits, in any dtype, with the bits of the plain stages.

In: logits, and the parameters of each row. Out: token ids. A row is divided into parts, and three kernels read it twice:

    _largest_kernel    the largest logit of each part, and its id
    _sum_kernel        the sum of the integer weights of each part
    _choose_kernel     the id of each row: of the largest logit, or that whose cumulative weight exceeds the threshold
    _draw_kernel       the same for rows with top_k or top_p that the largest logits do not decide

Programs that have nothing to do for their row end at once. The host need not know which these are, so a CUDA graph can capture
the launches.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra import libdevice

from nanoinfer.sampling.batch import ParameterColumns

_PART, _PART_WARPS = 4096, 4  # the ids in a part of a row, and the warps that share them
_TILE, _NUM_WARPS = 1024, 16  # the same in _draw_kernel, which reads one tile after the other
_SECTIONS = 8  # of the range that the search narrows at a time


@triton.jit
def _load(logits, row, ids, VOCAB: tl.constexpr):
    """Return logits of a row in fp32: inf in place of NaN, so that the largest is not finite, and -inf beyond the last id."""
    logit = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(logit < float("inf"), logit, float("inf"))


@triton.jit
def _weights(logits, largest, row, temperature, min_p):
    """Compute draw.integer_weights after stages.apply_temperature and stages.keep_min_p, which subtract the largest logit.

    libdevice.exp has the bits of torch's exp, and div_rn those of its division. tl.exp and / have others.
    """
    below = logits - largest
    if temperature is not None:
        below = tl.div_rn(below, tl.load(temperature + row))
    weights = (libdevice.exp(below) * 4294967296.0).to(tl.int64)
    if min_p is not None:
        weights = tl.where(weights.to(tl.float32) * (1 / 4294967296.0) < tl.load(min_p + row), 0, weights)
    return weights


@triton.jit
def _is_drawn(largest, row, greedy):
    is_drawn = tl.abs(largest) < float("inf")
    if greedy is not None:
        is_drawn = is_drawn & (tl.load(greedy + row) == 0)
    return is_drawn


@triton.jit
def _threshold(u, row, total):
    """Compute draw.thresholds."""
    return tl.minimum((tl.load(u + row) * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _largest_kernel(logits, maxima, first_ids, VOCAB: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Find the largest logit of a part and the lowest id that has it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    logit = _load(logits, row, ids, VOCAB)
    largest = tl.max(logit, 0)
    at = row * NUM_PARTS + part
    tl.store(maxima + at, largest)
    tl.store(first_ids + at, tl.min(tl.where(logit == largest, ids, VOCAB), 0))


@triton.jit
def _sum_kernel(
    logits, maxima, sums, greedy, temperature, min_p,
    VOCAB: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
):  # fmt: skip
    """Sum the weights of a part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PARTS_PADDED)
    largest = tl.max(tl.load(maxima + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=float("-inf")), 0)
    if _is_drawn(largest, row, greedy):
        logit = _load(logits, row, part * PART + tl.arange(0, PART), VOCAB)
        tl.store(sums + row * NUM_PARTS + part, tl.sum(_weights(logit, largest, row, temperature, min_p), 0))


@triton.jit
def _choose_kernel(
    logits, maxima, first_ids, sums, greedy, temperature, min_p, u, token_ids, row_maxima, totals,
    VOCAB: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
):  # fmt: skip
    """Choose the id of a row: find the part that holds the threshold, then the id in the part."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PADDED)
    at, inside = row * NUM_PARTS + parts, parts < NUM_PARTS
    of_parts = tl.load(maxima + at, mask=inside, other=float("-inf"))
    largest = tl.max(of_parts, 0)
    token_id = tl.min(tl.where(of_parts == largest, tl.load(first_ids + at, mask=inside, other=VOCAB), VOCAB), 0)
    token_id = tl.where(tl.abs(largest) < float("inf"), token_id, -1).to(tl.int64)
    if u is not None:
        total = tl.full([], 0, tl.int64)
        if _is_drawn(largest, row, greedy):
            weights = tl.load(sums + at, mask=inside, other=0)
            total = tl.sum(weights, 0)
            threshold = _threshold(u, row, total)
            part = tl.sum((tl.cumsum(weights, 0) <= threshold).to(tl.int32), 0)
            before = tl.sum(tl.where(parts < part, weights, 0), 0)
            logit = _load(logits, row, part * PART + tl.arange(0, PART), VOCAB)
            cumulative = before + tl.cumsum(_weights(logit, largest, row, temperature, min_p), 0)
            token_id = (part * PART + tl.sum((cumulative <= threshold).to(tl.int32), 0)).to(tl.int64)
        tl.store(totals + row, total)
    tl.store(token_ids + row, token_id)
    tl.store(row_maxima + row, largest)


@triton.jit
def _key(logits):
    """Return integers in the order of the floats: their bits, with those of negative floats flipped."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, which it equals
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _load_scaled(logits, largest, temperature, min_p, row, first, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the keys, after stages.apply_temperature, and the weights of TILE ids."""
    logit = _load(logits, row, first + tl.arange(0, TILE), VOCAB)
    scaled, top = logit, tl.load(largest + row)
    if temperature is not None:
        degree = tl.load(temperature + row)
        scaled = tl.where(degree == 1.0, logit, tl.div_rn(logit - top, degree))
    return _key(scaled), _weights(logit, top, row, temperature, min_p)


@triton.jit
def _weights_from(logits, largest, temperature, min_p, row, least, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Sum the weights of the ids whose key is at least `least`. least: [num]. Returns [num]."""
    sums = tl.zeros([TILE, least.shape[0]], tl.int64)
    for first in range(0, VOCAB, TILE):
        keys, tile = _load_scaled(logits, largest, temperature, min_p, row, first, VOCAB, TILE)
        sums += tl.where(keys[:, None] >= least[None, :], tile[:, None], 0)
    return tl.sum(sums, 0)


@triton.jit
def _load_kept(
    logits, largest, temperature, min_p, row, first, low, above, enough, num_ties, VOCAB: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return the weights of TILE ids, 0 for what top_p drops, and how many ids up to them have the key `low`.

    above: the weight of all larger keys. num_ties: the ids before these that have the key `low`.
    """
    keys, tile = _load_scaled(logits, largest, temperature, min_p, row, first, VOCAB, TILE)
    ties = (keys == low).to(tl.int64)
    before = above + (num_ties + tl.cumsum(ties, 0) - ties) * tile
    kept = tl.where((keys > low) | ((ties == 1) & (before.to(tl.float64) < enough)), tile, 0)
    return kept, num_ties + tl.sum(ties, 0)


@triton.jit
def _draw_kernel(
    logits, largest, temperature, min_p, smallest, top_p, u, is_undecided, token_ids, VOCAB: tl.constexpr,
    TILE: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Draw from a row as stages.drop_beyond and draw.draw do.

    A search finds the largest key that, with those above, weighs top_p of all. Ids of this key enter by rising id.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_undecided + row):
        low = _key(tl.load(smallest + row))
        high = tl.full([], 2**31 - 1, tl.int64)
        sections = tl.arange(0, SECTIONS).to(tl.int64)
        all_keys = low + tl.zeros([1], tl.int64)
        of_all = tl.sum(_weights_from(logits, largest, temperature, min_p, row, all_keys, VOCAB, TILE), 0)
        enough = tl.load(top_p + row) * of_all.to(tl.float64)
        while low < high:
            width = (high - low + SECTIONS - 1) // SECTIONS
            least = low + (sections + 1) * width
            weight = _weights_from(logits, largest, temperature, min_p, row, least, VOCAB, TILE)
            num_enough = tl.sum((weight.to(tl.float64) >= enough).to(tl.int64), 0)
            high = tl.minimum(high, low + (num_enough + 1) * width - 1)
            low += num_enough * width
        larger_keys = low + 1 + tl.zeros([1], tl.int64)
        above = tl.sum(_weights_from(logits, largest, temperature, min_p, row, larger_keys, VOCAB, TILE), 0)
        total = tl.full([], 0, tl.int64)
        num_ties = tl.full([], 0, tl.int64)
        for first in range(0, VOCAB, TILE):
            kept, num_ties = _load_kept(
                logits, largest, temperature, min_p, row, first, low, above, enough, num_ties, VOCAB, TILE
            )  # fmt: skip
            total += tl.sum(kept, 0)
        threshold = _threshold(u, row, total)
        token_id = tl.full([], 0, tl.int64)
        cumulative = tl.full([], 0, tl.int64)
        num_ties = tl.full([], 0, tl.int64)
        for first in range(0, VOCAB, TILE):
            kept, num_ties = _load_kept(
                logits, largest, temperature, min_p, row, first, low, above, enough, num_ties, VOCAB, TILE
            )  # fmt: skip
            token_id += tl.sum((cumulative + tl.cumsum(kept, 0) <= threshold).to(tl.int64), 0)
            cumulative += tl.sum(kept, 0)
        tl.store(token_ids + row, tl.minimum(token_id, VOCAB - 1))


def choose(
    logits: Float[Tensor, "batch vocab"], columns: ParameterColumns, u: Float[Tensor, " batch"] | None
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Choose a token id per row, greedily or by the draw from all ids that min_p keeps.

    Args:
        logits: those after every stage before the temperature, in any dtype.
        columns: greedy, temperature and min_p are read.
        u: the uniform number of each row, in float64. None: every row is greedy, and the sums of weights are not computed.

    Returns:
        The ids, -1 for a row whose largest logit is not finite, the largest logits in fp32, and the sums of the weights.
    """
    (batch, vocab), logits, device = logits.shape, logits.contiguous(), logits.device
    part = min(_PART, triton.next_power_of_2(vocab))  # an interpreter has less to do
    num_parts = triton.cdiv(vocab, part)
    sizes = vocab, part, num_parts, triton.next_power_of_2(num_parts)
    maxima = torch.empty(batch, num_parts, dtype=torch.float32, device=device)
    first_ids = torch.empty(batch, num_parts, dtype=torch.int32, device=device)
    sums = torch.empty(batch, num_parts, dtype=torch.int64, device=device)
    # Two allocations: in one, an odd number of rows would move the second off 16 bytes, and Triton would compile again.
    token_ids, totals = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    largest = torch.empty(batch, dtype=torch.float32, device=device)
    parameters = columns.greedy, columns.temperature, columns.min_p
    _largest_kernel[(batch, num_parts)](logits, maxima, first_ids, vocab, part, num_parts, num_warps=_PART_WARPS)
    if u is not None:
        _sum_kernel[(batch, num_parts)](logits, maxima, sums, *parameters, *sizes, num_warps=_PART_WARPS)
    _choose_kernel[(batch,)](
        logits, maxima, first_ids, sums, *parameters, u, token_ids, largest, totals, *sizes, num_warps=_NUM_WARPS
    )  # fmt: skip
    return token_ids, largest, totals


def draw_undecided(
    logits: Float[Tensor, "batch vocab"],
    largest: Float[Tensor, " batch"],
    columns: ParameterColumns,
    smallest: Float[Tensor, " batch"],
    top_p: Float[Tensor, " batch"],
    u: Float[Tensor, " batch"],
    is_undecided: Bool[Tensor, " batch"],
    token_ids: Int[Tensor, " batch"],
) -> None:
    """Write the token ids of the undecided rows.

    Args:
        logits: those after every stage before the temperature, in any dtype.
        largest: the largest logit of each row, in fp32.
        columns: temperature and min_p are read.
        smallest: the smallest logit of each row that top_k keeps, after the temperature in fp32, or -inf.
        top_p: float64.
        u: the uniform number of each row, in float64.
        is_undecided: which rows are computed.
        token_ids: those of the other rows stay.
    """
    (batch, vocab), logits = logits.shape, logits.contiguous()
    tile = min(_TILE, triton.next_power_of_2(vocab))  # an interpreter has less to do
    _draw_kernel[(batch,)](
        logits, largest, columns.temperature, columns.min_p, smallest, top_p, u, is_undecided, token_ids,
        vocab, tile, _SECTIONS, num_warps=_NUM_WARPS,
    )  # fmt: skip
