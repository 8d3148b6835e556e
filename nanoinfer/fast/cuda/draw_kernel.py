"""Triton kernels of the draw: a GPU computes token ids from the logits, in any dtype, with the bits of the plain stages.

In: logits, and the parameters of each row. Out: token ids. A row is divided into parts, and these into sections. The kernels
read a row twice, and for top_k and top_p a list of its largest logits:

    _largest_kernel    the largest logit of each part, and its id, and the largest of each section
    _bound_kernel      the logit from which on ids are listed: as many sections as top_k says have one
    _sum_kernel        the sum of the integer weights of each part, and the list
    _choose_kernel     the id of each row: of the largest logit, or that whose cumulative weight exceeds the threshold

An id's place is an integer that orders the ids as top_k and top_p let them in: by the logit, and equal logits by the id. What
they keep are the ids from some place on, and a search finds the place from which on ids weigh enough. It needs no sorted list,
so the parts may add to the list in any order: sums of integers do not depend on it. Where the list is not enough, the search
reads the whole row.

Programs that have nothing to do for their row end at once. The host need not know which these are, so a CUDA graph can capture
the launches.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra import libdevice

from nanoinfer.sampling.batch import ParameterColumns

_PART, _PART_WARPS = 4096, 4  # the ids in a part of a row, and the warps that share them
_SECTION = 32  # the ids in a section
_TRIED = 256  # the sections of which a row with top_p, but without top_k, lists the largest logits
_LIST = 4096  # the most ids that a row lists
_TILE = 512  # the ids that a search reads at a time
_BOUND_WARPS, _CHOOSE_WARPS = 8, 16  # the warps of _bound_kernel and _choose_kernel
_WAYS = 8  # a search divides its range by so many numbers at a time

_COUNT, _PLACE, _ID = (tl.constexpr(i) for i in range(3))  # the kinds of searches

Uniform = Float[Tensor, " batch"] | tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]


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
def _keys(logits, largest, row, temperature):
    """Return integers in the order of the logits after stages.apply_temperature: their bits, those of negative ones flipped."""
    if temperature is not None:
        degree = tl.load(temperature + row)
        logits = tl.where(degree == 1.0, logits, tl.div_rn(logits - largest, degree))
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, which it equals
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _lowest_key():
    return tl.full([], -(2**31), tl.int64)


@triton.jit
def _is_drawn(largest, row, greedy):
    is_drawn = tl.abs(largest) < float("inf")
    if greedy is not None:
        is_drawn = is_drawn & (tl.load(greedy + row) == 0)
    return is_drawn


@triton.jit
def _top(top_k, top_p, row, VOCAB: tl.constexpr):
    """Return top_k of a row, VOCAB if it is off, and top_p, 1 if it is off, and whether one of them is on."""
    k, p = tl.full([], VOCAB, tl.int64), tl.full([], 1.0, tl.float64)
    if top_k is not None:
        k = tl.minimum(tl.load(top_k + row), VOCAB)
    if top_p is not None:
        p = tl.load(top_p + row)
    return k, p, (k < VOCAB) | (p < 1.0)


@triton.jit
def _uniform(u, seeds, positions, row):
    """Return a row's u, or without it compute draw.uniform."""
    if u is None:
        position = tl.load(positions + row).to(tl.int64)
        low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
        first, second, _, _ = tl.philox(tl.load(seeds + row), low, high, 0, 0)
        bits = (first >> 5).to(tl.int64) * 67108864 + (second >> 6).to(tl.int64)  # 27 of the first, and 26 of the second
        uniform = bits.to(tl.float64) * (1 / 9007199254740992.0)
    else:
        uniform = tl.load(u + row)
    return uniform


@triton.jit
def _largest_kernel(
    logits, maxima, first_ids, section_maxima,
    VOCAB: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr, SECTION: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of a part, the lowest id that has it, and the largest of each section."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    logit = _load(logits, row, ids, VOCAB)
    largest = tl.max(logit, 0)
    at = row * NUM_PARTS + part
    tl.store(maxima + at, largest)
    tl.store(first_ids + at, tl.min(tl.where(logit == largest, ids, VOCAB), 0))
    if section_maxima is not None:
        sections = at * (PART // SECTION) + tl.arange(0, PART // SECTION)
        tl.store(section_maxima + sections, tl.max(tl.reshape(logit, (PART // SECTION, SECTION)), 1))


@triton.jit
def _narrowed(low, high, width, sums, enough):
    """Return the part of a search's range that holds the largest number from which on the sum is enough.

    sums: those from low + width, low + 2 * width, ... on, which fall. [WAYS]
    """
    num_enough = tl.sum((sums.to(tl.float64) >= enough).to(tl.int64), 0)
    return low + num_enough * width, tl.minimum(high, low + (num_enough + 1) * width - 1)


@triton.jit
def _sum_kernel(
    logits, maxima, sums, bounds, listed, num_listed, greedy, temperature, min_p, top_k, top_p,
    VOCAB: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Sum the weights of a part, and list its ids from the bound on that have a weight."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, PARTS_PADDED)
    largest = tl.max(tl.load(maxima + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=float("-inf")), 0)
    if _is_drawn(largest, row, greedy):
        ids = part * PART + tl.arange(0, PART)
        logit = _load(logits, row, ids, VOCAB)
        weights = _weights(logit, largest, row, temperature, min_p)
        tl.store(sums + row * NUM_PARTS + part, tl.sum(weights, 0))
        if bounds is not None:
            _, _, drops = _top(top_k, top_p, row, VOCAB)
            if drops:
                keys = _keys(logit, largest, row, temperature)
                is_listed = ((keys >= tl.load(bounds + row)) & (weights > 0)).to(tl.int32)
                num = tl.sum(is_listed, 0)
                if num > 0:
                    start = tl.atomic_add(num_listed + row, num, sem="relaxed")
                    at = start + tl.cumsum(is_listed, 0) - 1
                    tl.store(listed + row * LIST + at, ids, mask=(is_listed == 1) & (at < LIST))


@triton.jit
def _load_places(row_of, first, VOCAB: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr):
    """Return the places and the weights of TILE ids, listed or all. The place is the key, and then the id, lowest last."""
    logits, largest, temperature, min_p, row, listed, num_listed, num = row_of
    at = first + tl.arange(0, TILE)
    ids = tl.load(listed + row * LIST + at, mask=at < num_listed, other=at)
    ids = tl.where(at < num, ids, VOCAB)  # beyond the last, without a weight
    logit = _load(logits, row, ids, VOCAB)
    places = (_keys(logit, largest, row, temperature) << BITS) + ((1 << BITS) - 1 - ids)
    return places, _weights(logit, largest, row, temperature, min_p)


@triton.jit
def _weigh(row_of, least, VOCAB: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr):
    """Sum the weights of the ids from the place `least` on."""
    sums = tl.zeros([TILE], tl.int64)
    for first in range(0, row_of[7], TILE):
        places, weights = _load_places(row_of, first, VOCAB, BITS, LIST, TILE)
        sums += tl.where(places >= least, weights, 0)
    return tl.sum(sums, 0)


@triton.jit
def _search(
    row_of, least, low, high, enough, KIND: tl.constexpr,
    VOCAB: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Find the largest number in low .. high from which on the ids weigh enough, of those from the place `least` on.

    KIND: _PLACE: the numbers are the places. _COUNT: they are the keys, and each id weighs 1. _ID: the ids, in falling order.
    """
    ways = tl.arange(0, WAYS).to(tl.int64)
    while low < high:
        width = (high - low + WAYS - 1) // WAYS
        bounds = low + (ways + 1) * width
        sums = tl.zeros([TILE, WAYS], tl.int64)
        for first in range(0, row_of[7], TILE):
            numbers, weights = _load_places(row_of, first, VOCAB, BITS, LIST, TILE)
            weights = tl.where(numbers >= least, weights, 0)
            if KIND == _COUNT:
                numbers, weights = numbers >> BITS, tl.minimum(weights, 1)
            if KIND == _ID:
                numbers = numbers & ((1 << BITS) - 1)
            sums += tl.where(numbers[:, None] >= bounds[None, :], weights[:, None], 0)
        low, high = _narrowed(low, high, width, tl.sum(sums, 0), enough)
    return low


@triton.jit
def _bound_kernel(
    maxima, section_maxima, bounds, num_listed, greedy, temperature, min_p, top_k, top_p,
    VOCAB: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, NUM_SECTIONS: tl.constexpr, TRIED: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Find the k-th largest key of the sections' largest logits, so that k ids and few more have keys as large.

    Without top_k, find the TRIED-th largest. If fewer sections have a weight, the bound is below all keys.
    """
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PADDED)
    largest = tl.max(tl.load(maxima + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=float("-inf")), 0)
    k, _, drops = _top(top_k, top_p, row, VOCAB)
    tl.store(num_listed + row, 0)
    if _is_drawn(largest, row, greedy) & drops:
        row_of = section_maxima, largest, temperature, min_p, row, num_listed, 0, NUM_SECTIONS  # 0: it reads no list
        low, high = _lowest_key(), _keys(largest, largest, row, temperature)
        enough = tl.where(k < VOCAB, k, TRIED).to(tl.float64)
        bound = _search(row_of, low << BITS, low, high, enough, _COUNT, NUM_SECTIONS, BITS, 1, TILE, WAYS)
        tl.store(bounds + row, bound)


@triton.jit
def _draw_kept(
    row_of, bound, total, k, p, u,
    VOCAB: tl.constexpr, BITS: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Draw from the ids that stages.keep_top_k and stages.keep_top_p keep. total: the weight of the row."""
    logits, largest, temperature, min_p, row, listed, num_listed, num = row_of
    low, high, last = bound, _keys(largest, largest, row, temperature), (1 << BITS) - 1
    if (k == VOCAB) & (num_listed > 0):
        of_listed = _weigh(row_of, low << BITS, VOCAB, BITS, LIST, TILE)
        num_listed = tl.where(of_listed.to(tl.float64) < p * total.to(tl.float64), 0, num_listed)  # top_p keeps more ids
    if num_listed == 0:
        low, num = _lowest_key(), tl.full([], VOCAB, tl.int64)
    row_of = logits, largest, temperature, min_p, row, listed, num_listed, num
    least = low << BITS
    if k < VOCAB:
        least = _search(row_of, least, low, high, k.to(tl.float64), _COUNT, VOCAB, BITS, LIST, TILE, WAYS) << BITS
        total = _weigh(row_of, least, VOCAB, BITS, LIST, TILE)
    if p < 1.0:
        enough = p * total.to(tl.float64)
        least = _search(row_of, least, least, (high << BITS) + last, enough, _PLACE, VOCAB, BITS, LIST, TILE, WAYS)
        total = _weigh(row_of, least, VOCAB, BITS, LIST, TILE)
    enough = (_threshold(u, total) + 1).to(tl.float64)
    zero = tl.full([], 0, tl.int64)
    return last - _search(row_of, least, zero, zero + last, enough, _ID, VOCAB, BITS, LIST, TILE, WAYS)


@triton.jit
def _threshold(u, total):
    """Compute draw.thresholds."""
    return tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_from_all(
    logits, largest, temperature, min_p, row, sums, uniform, VOCAB: tl.constexpr, PART: tl.constexpr, PARTS_PADDED: tl.constexpr
):  # fmt: skip
    """Draw from all ids: find the part that holds the threshold, then the id in the part. sums: the weights of the parts."""
    threshold = _threshold(uniform, tl.sum(sums, 0))
    part = tl.sum((tl.cumsum(sums, 0) <= threshold).to(tl.int32), 0)
    before = tl.sum(tl.where(tl.arange(0, PARTS_PADDED) < part, sums, 0), 0)
    logit = _load(logits, row, part * PART + tl.arange(0, PART), VOCAB)
    cumulative = before + tl.cumsum(_weights(logit, largest, row, temperature, min_p), 0)
    return (part * PART + tl.sum((cumulative <= threshold).to(tl.int32), 0)).to(tl.int64)


@triton.jit
def _choose_kernel(
    logits, maxima, first_ids, sums, bounds, listed, num_listed, greedy, temperature, min_p, top_k, top_p, u, seeds,
    positions, token_ids, VOCAB: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr,
    LIST: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Choose the id of a row."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PADDED)
    at, inside = row * NUM_PARTS + parts, parts < NUM_PARTS
    of_parts = tl.load(maxima + at, mask=inside, other=float("-inf"))
    largest = tl.max(of_parts, 0)
    token_id = tl.min(tl.where(of_parts == largest, tl.load(first_ids + at, mask=inside, other=VOCAB), VOCAB), 0)
    token_id = tl.where(tl.abs(largest) < float("inf"), token_id, -1).to(tl.int64)
    if sums is not None:  # noqa: SIM102  it is decided when the kernel is compiled, as are others below
        if _is_drawn(largest, row, greedy):
            uniform, weights = _uniform(u, seeds, positions, row), tl.load(sums + at, mask=inside, other=0)
            k, p, drops = _top(top_k, top_p, row, VOCAB)
            if bounds is not None:  # noqa: SIM102
                if drops:
                    num = tl.load(num_listed + row).to(tl.int64)
                    num = tl.where(num <= LIST, num, 0)  # 0: all ids are read
                    row_of = logits, largest, temperature, min_p, row, listed, num, num
                    total = tl.sum(weights, 0)
                    token_id = _draw_kept(row_of, tl.load(bounds + row), total, k, p, uniform, VOCAB, BITS, LIST, TILE, WAYS)
            if not drops:
                token_id = _draw_from_all(
                    logits, largest, temperature, min_p, row, weights, uniform, VOCAB, PART, PARTS_PADDED
                )  # fmt: skip
    tl.store(token_ids + row, token_id)


def choose(logits: Float[Tensor, "batch vocab"], columns: ParameterColumns, u: Uniform | None) -> Int[Tensor, " batch"]:
    """Choose a token id per row, greedily or by the draw, as the last four stages and sampler.choose do. It can be captured.

    Args:
        logits: those after every stage before the temperature, in any dtype.
        columns: greedy, temperature, min_p, top_k and top_p are read.
        u: the uniform number of each row, in float64. Or the seed of each row and the position of its token, from which the
            kernels compute draw.uniform. None: every row is greedy.

    Returns:
        The ids, -1 for a row whose largest logit is not finite.
    """
    (batch, vocab), logits = logits.shape, logits.contiguous()
    part = min(_PART, triton.next_power_of_2(vocab))  # an interpreter has less to do
    num_parts, section = triton.cdiv(vocab, part), min(_SECTION, part)
    num_sections = num_parts * (part // section)
    maxima, first_ids = _rows_of(num_parts, torch.float32, logits), _rows_of(num_parts, torch.int32, logits)
    token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    sums = section_maxima = bounds = listed = num_listed = None
    if u is not None and (columns.top_k is not None or columns.top_p is not None):
        section_maxima, listed = _rows_of(num_sections, torch.float32, logits), _rows_of(_LIST, torch.int32, logits)
        bounds = torch.empty(batch, dtype=torch.int64, device=logits.device)
        num_listed = torch.empty(batch, dtype=torch.int32, device=logits.device)
    sizes = vocab, part, num_parts, triton.next_power_of_2(num_parts)
    rule = columns.greedy, columns.temperature, columns.min_p, columns.top_k, columns.top_p
    _largest_kernel[(batch, num_parts)](
        logits, maxima, first_ids, section_maxima, vocab, part, num_parts, section, num_warps=_PART_WARPS
    )  # fmt: skip
    search = vocab.bit_length(), min(_TILE, triton.next_power_of_2(vocab)), _WAYS
    if bounds is not None:
        tried = min(_TRIED, triton.cdiv(num_sections, 2))
        _bound_kernel[(batch,)](
            maxima, section_maxima, bounds, num_listed, *rule,
            vocab, num_parts, sizes[-1], num_sections, tried, *search, num_warps=_BOUND_WARPS,
        )  # fmt: skip
    if u is not None:
        sums = _rows_of(num_parts, torch.int64, logits)
        _sum_kernel[(batch, num_parts)](
            logits, maxima, sums, bounds, listed, num_listed, *rule, *sizes, _LIST, num_warps=_PART_WARPS
        )  # fmt: skip
    uniform = (None, *u) if isinstance(u, tuple) else (u, None, None)
    _choose_kernel[(batch,)](
        logits, maxima, first_ids, sums, bounds, listed, num_listed, *rule, *uniform, token_ids,
        *sizes, _LIST, *search, num_warps=_CHOOSE_WARPS,
    )  # fmt: skip
    return token_ids


def _rows_of(num_columns: int, dtype: torch.dtype, logits: Tensor) -> Tensor:
    """Allocate columns for each row of the logits. A slice of a larger tensor may begin off 16 bytes,
    and Triton would compile the kernels again.
    """
    return torch.empty(len(logits), num_columns, dtype=dtype, device=logits.device)
