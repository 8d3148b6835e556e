"""A Triton kernel that draws from all logits of a row. It serves the rows on a GPU that the largest logits do not decide.

In: logits and weights of every id. Out: the token ids of the undecided rows. The programs of other rows end at once, so the
host need not know which rows these are, and a CUDA graph can capture the launch.
"""

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

_TILE, _NUM_WARPS = 2048, 16  # ids at a time, and the warps that share them
_SECTIONS = 8  # of the range that the search narrows at a time


@triton.jit
def _key(logits):
    """Return integers in the order of the floats: their bits, with those of negative floats flipped."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, which it equals
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _load(logits, weights, row, first, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the keys and the weights of TILE ids, weights of 0 beyond the last id."""
    ids = first + tl.arange(0, TILE)
    logit = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    return _key(logit), tl.load(weights + row * VOCAB + ids, mask=ids < VOCAB, other=0)


@triton.jit
def _weights_from(logits, weights, row, least, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Sum the weights of the ids whose key is at least `least`. least: [num]. Returns [num]."""
    sums = tl.zeros([TILE, least.shape[0]], tl.int64)
    for first in range(0, VOCAB, TILE):
        keys, tile = _load(logits, weights, row, first, VOCAB, TILE)
        sums += tl.where(keys[:, None] >= least[None, :], tile[:, None], 0)
    return tl.sum(sums, 0)


@triton.jit
def _load_kept(logits, weights, row, first, low, above, enough, num_ties, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the weights of TILE ids, 0 for what top_p drops, and how many ids up to them have the key `low`.

    above: the weight of all larger keys. num_ties: the ids before these that have the key `low`.
    """
    keys, tile = _load(logits, weights, row, first, VOCAB, TILE)
    ties = (keys == low).to(tl.int64)
    before = above + (num_ties + tl.cumsum(ties, 0) - ties) * tile
    kept = tl.where((keys > low) | ((ties == 1) & (before.to(tl.float64) < enough)), tile, 0)
    return kept, num_ties + tl.sum(ties, 0)


@triton.jit
def _draw_kernel(
    logits, weights, smallest, top_p, u, is_undecided, token_ids, VOCAB: tl.constexpr, TILE: tl.constexpr,
    SECTIONS: tl.constexpr,
):  # fmt: skip
    """Draw from a row as stages.drop_beyond and draw.draw do.

    A search finds the largest key that, with those above, weighs top_p of all. Ids of this key enter by rising id.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_undecided + row):
        low = _key(tl.load(smallest + row))
        high = tl.full([], 2**31 - 1, tl.int64)
        sections = tl.arange(0, SECTIONS).to(tl.int64)
        of_all = tl.sum(_weights_from(logits, weights, row, low + tl.zeros([1], tl.int64), VOCAB, TILE), 0)
        enough = tl.load(top_p + row) * of_all.to(tl.float64)
        while low < high:
            width = (high - low + SECTIONS - 1) // SECTIONS
            weight = _weights_from(logits, weights, row, low + (sections + 1) * width, VOCAB, TILE)
            num_enough = tl.sum((weight.to(tl.float64) >= enough).to(tl.int64), 0)
            high = tl.minimum(high, low + (num_enough + 1) * width - 1)
            low += num_enough * width
        above = tl.sum(_weights_from(logits, weights, row, low + 1 + tl.zeros([1], tl.int64), VOCAB, TILE), 0)
        total = tl.full([], 0, tl.int64)
        num_ties = tl.full([], 0, tl.int64)
        for first in range(0, VOCAB, TILE):
            kept, num_ties = _load_kept(logits, weights, row, first, low, above, enough, num_ties, VOCAB, TILE)
            total += tl.sum(kept, 0)
        threshold = tl.minimum((tl.load(u + row) * total.to(tl.float64)).to(tl.int64), total - 1)
        token_id = tl.full([], 0, tl.int64)
        cumulative = tl.full([], 0, tl.int64)
        num_ties = tl.full([], 0, tl.int64)
        for first in range(0, VOCAB, TILE):
            kept, num_ties = _load_kept(logits, weights, row, first, low, above, enough, num_ties, VOCAB, TILE)
            token_id += tl.sum((cumulative + tl.cumsum(kept, 0) <= threshold).to(tl.int64), 0)
            cumulative += tl.sum(kept, 0)
        tl.store(token_ids + row, tl.minimum(token_id, VOCAB - 1))


def draw_undecided(
    logits: Float[Tensor, "batch vocab"],
    weights: Int[Tensor, "batch vocab"],
    smallest: Float[Tensor, " batch"],
    top_p: Float[Tensor, " batch"],
    u: Float[Tensor, " batch"],
    is_undecided: Bool[Tensor, " batch"],
    token_ids: Int[Tensor, " batch"],
) -> None:
    """Write the token ids of the undecided rows.

    Args:
        logits: after the temperature, in fp32.
        weights: draw.integer_weights of them, 0 for what min_p drops.
        smallest: the smallest logit of each row that top_k keeps, or -inf.
        top_p: float64.
        u: the uniform number of each row, in float64.
        is_undecided: which rows are computed.
        token_ids: those of the other rows stay.
    """
    batch, vocab = logits.shape
    tile = min(_TILE, triton.next_power_of_2(vocab))  # an interpreter has less to do
    _draw_kernel[(batch,)](
        logits, weights, smallest, top_p, u, is_undecided, token_ids, vocab, tile, _SECTIONS, num_warps=_NUM_WARPS
    )  # fmt: skip
