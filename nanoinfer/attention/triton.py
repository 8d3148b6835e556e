r"""Paged attention on a GPU in Triton kernels: store, prefill, decode, merge, copy. triton comes with torch's CUDA build.

Prefill and decode read pages through the block table, so nothing is gathered first. Both use the running softmax (Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867, tiled in Dao et al. 2022, https://arxiv.org/abs/2205.14135), which reads a
tile of keys at a time and keeps three values per query of all earlier tiles:

    m  the largest score so far          m' = max(m, max(s))
    l  the sum of exp(score - m)         l' = l * exp(m - m') + sum(exp(s - m'))
    o  the sum of exp(score - m) * v     o' = o * exp(m - m') + exp(s - m') @ v         the answer is o / l

    prefill, a program per                         decode, a program per (sequence, KV head, split)
    (sequence, tile of queries, head)
                  keys ->                                          keys ->
             +----+----+----+                                 | split 0   | split 1   |
    queries  | 0  | 1  |\   |  one program walks       group  +-----+-----+-----+-----+  the queries that share a KV head
       |     |    |    | \  |  right until the         of     |  0  |  1  |  0  |  1  |  are the tile's rows; each split has
       v     +----+----+----+  diagonal               queries +-----+-----+-----+-----+  its own m, l, o, merged at the end

With a window, both begin at the first key of the window. A sink is an extra key with the value 0, merged at the end.

Decode splits the keys, because a few long sequences with a query each would leave most of the GPU idle. reference.py
is the plain version of both, and `_with_tile` below has the formula. In a compiled model the store also rotates q and k.

In a cache of 8 bits (features/int8_cache) the store rounds each head to integers with a scale. The products are of integers: a
key's scale multiplies its scores, and a value's scale its weights.
"""

import os
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.dense import Keys, Queries, Sinks, Window, with_whole_heads
from nanoinfer.attention.kv_cache import KVCache, Layout

MAX_HEAD_DIM = 256  # limited by the registers that a tile takes
_TARGET_PROGRAMS = 512  # decode is split until it has this many programs (an H100 has 132 processors, each runs several)
_MAX_SPLITS = 32
_TILE = 64  # the number of queries, and of keys, in a tile. It is smaller for heads wider than _WIDE, and without tensor cores
_WIDE = 128
_MIN_ROWS = 16  # the minimum for a matrix product on tensor cores
_MIN_COPIES = 64  # copied blocks that a kernel has room for. Few steps have more, for which Triton compiles another kernel
_COPIED_NUMBERS = 4096  # of a program. They are in registers


class Rotation(NamedTuple):
    """What becomes of q and k before attention. Tensors are contiguous, in the dtype of q and k."""

    cos: Tensor  # of each token's angles, [num_tokens, 1, num_rotated]. Further numbers of a head stay as they are
    sin: Tensor  # as cos
    weight: Tensor | None = None  # of an RMSNorm over each head of q before the rotation. None: no norm
    eps: float = 0.0
    k_weight: Tensor | None = None  # as weight, of k
    k_eps: float = 0.0
    factor: float | None = None  # by which q is multiplied after the rotation. None: by none
    zero_centred: bool = False  # whether the norms multiply by 1 + weight


# The keys and values of a layer, and the scales of both (None: the pages hold the numbers), as KVCache's layer and scales.
Pages = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@triton.jit
def _load_scale(weight, places, inside, ZERO_CENTRED: tl.constexpr):
    """Return by what a norm with this weight multiplies the numbers at these places, in fp32."""
    scale = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    return scale + 1.0 if ZERO_CENTRED else scale


@triton.jit
def _rotated(
    x, token, cos, sin, weight, eps, factor, heads, dims, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Return a token's heads in fp32, normed if there is a weight, and rotated if there are angles.

    A number becomes number * cos + other * sin, where `other` is the number at its place in (-second half, first half) of the
    first ROTATED numbers. The others stay.
    """
    dims = dims + heads * 0  # so that all loads divide a tile among the threads alike, which need not exchange numbers then
    others = (dims + ROTATED // 2) % ROTATED
    inside = (heads < HEADS) & (dims < HEAD_DIM)
    number = tl.load(x + heads * HEAD_DIM + dims, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        turned = inside if ROTATED == HEAD_DIM else inside & (dims < ROTATED)
        other = tl.load(x + heads * HEAD_DIM + others, mask=turned, other=0.0).to(tl.float32)
        if weight is not None:
            shrink = tl.rsqrt(tl.sum(number * number, 1) / HEAD_DIM + eps)[:, None]
            number *= _load_scale(weight, dims, inside, ZERO_CENTRED) * shrink
            other *= _load_scale(weight, others, turned, ZERO_CENTRED) * shrink
        c = tl.load(cos + token * ROTATED + dims, mask=turned, other=0.0).to(tl.float32)
        s = tl.load(sin + token * ROTATED + dims, mask=turned, other=0.0).to(tl.float32)
        rotated = number * c + tl.where(dims < ROTATED // 2, -other, other) * s
        number = rotated if ROTATED == HEAD_DIM else tl.where(dims < ROTATED, rotated, number)
        number = number.to(x.dtype.element_ty).to(tl.float32)
        if factor is not None:
            number = (number * factor).to(x.dtype.element_ty).to(tl.float32)
    return number


@triton.jit
def _to_integers(heads):
    """Round each head as int8_cache's quantized_heads. Returns the integers as fp32, and the scales, [heads].

    A head that is not finite has the scale NaN.
    """
    num_bad = tl.sum(tl.where(tl.abs(heads) < float("inf"), 0, 1), 1)  # NaN compares as false
    heads = tl.where((num_bad == 0)[:, None], heads, 0.0)
    largest = tl.max(tl.abs(heads), 1)
    factors = tl.div_rn(127.0, tl.where(largest > 0, largest, 1.0))
    # The sum with 1.5 * 2^23 has no fraction: it is rounded to the nearest integer, to the even one of two. The clamp keeps the
    # compiler from making one instruction of product and sum, which would round once.
    numbers = tl.minimum(tl.maximum(heads * factors[:, None], -127.0), 127.0)
    return (numbers + 12582912.0) - 12582912.0, tl.where(num_bad == 0, tl.div_rn(largest, 127.0), float("nan"))


@triton.jit
def _store_heads(
    pages, scales, x, slot, heads, columns, inside,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store a token's heads, [heads, dims], in its slot. columns, inside: where they are among all heads, and which exist."""
    if scales is not None:
        x, scale = _to_integers(x)
        place = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        tl.store(scales + place, scale[:, None], mask=heads < KV_HEADS)
    where = slot * KV_HEADS * HEAD_DIM + columns
    tl.store(pages + where, x, mask=inside)


@triton.jit
def _store_kernel(
    q, k, v, out, k_pages, v_pages, slots, k_scales, v_scales, cos, sin, weight, eps, k_weight, k_eps, factor,
    q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATED: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Copy one token's keys and values per program, as kv_cache.finite_values returns them. With angles, rotate q and k."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)[None, :]
    if cos is not None:
        heads = tl.arange(0, HEADS_PADDED)[:, None]
        query = _rotated(
            q + token * q_stride, token, cos, sin, weight, eps, factor, heads, dims, HEADS, HEAD_DIM, ROTATED, ZERO_CENTRED
        )  # fmt: skip
        where = (token * HEADS + heads) * HEAD_DIM + dims
        tl.store(out + where, query.to(out.dtype.element_ty), mask=(heads < HEADS) & (dims < HEAD_DIM))
    if k is not None:
        heads = tl.arange(0, KV_HEADS_PADDED)[:, None]
        inside = (heads < KV_HEADS) & (dims < HEAD_DIM)
        columns = heads * HEAD_DIM + dims
        key = _rotated(
            k + token * k_stride, token, cos, sin, k_weight, k_eps, None, heads, dims, KV_HEADS, HEAD_DIM, ROTATED, ZERO_CENTRED
        )  # fmt: skip
        value = tl.load(v + token * v_stride + columns, mask=inside, other=0.0).to(tl.float32)
        num_bad = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1), 1)  # NaN compares as false
        is_finite = (num_bad == 0)[:, None]
        slot = tl.load(slots + token)
        key = tl.where(is_finite, key, float("nan"))
        _store_heads(k_pages, k_scales, key, slot, heads, columns, inside, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        value = tl.where(is_finite, value, 0.0)
        _store_heads(v_pages, v_scales, value, slot, heads, columns, inside, BLOCK_SIZE, KV_HEADS, HEAD_DIM)


@triton.jit(do_not_specialize=["num_copies"])
def _copy_kernel(
    pages, sources, targets, num_copies, layer_size, COPIES: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Copy a tile of all copied blocks, in one layer's keys or values, per program. It reads them all before it writes."""
    start = pages + tl.program_id(1).to(tl.int64) * layer_size
    copies = tl.arange(0, COPIES)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
    source = tl.load(sources + copies, mask=copies < num_copies, other=0)[:, None]
    target = tl.load(targets + copies, mask=copies < num_copies, other=0)[:, None]
    inside = (copies < num_copies)[:, None] & (columns < SIZE)
    tile = tl.load(start + source * SIZE + columns, mask=inside)
    tl.debug_barrier()  # a thread may write what another one reads
    tl.store(start + target * SIZE + columns, tile, mask=inside)


@triton.jit
def _load_tile(
    k_pages, v_pages, k_scales, v_scales, block_table, kv_head, keys, last_key, dims,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return k and v of a tile of keys, [keys, dims], and their scales, [keys] (None: there are none). 0 from last_key on."""
    inside = keys < last_key
    blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=inside, other=0)
    slots = blocks * BLOCK_SIZE + keys % BLOCK_SIZE
    offsets = (slots.to(tl.int64) * NUM_KV_HEADS + kv_head) * HEAD_DIM  # for each key
    there = inside[:, None] & (dims[None, :] < HEAD_DIM)
    k = tl.load(k_pages + offsets[:, None] + dims[None, :], mask=there, other=0.0)
    v = tl.load(v_pages + offsets[:, None] + dims[None, :], mask=there, other=0.0)
    if k_scales is None:
        return k, v, None, None
    else:
        places = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        k_scale = tl.load(k_scales + places, mask=inside, other=0.0)
        return k, v, k_scale, tl.load(v_scales + places, mask=inside, other=0.0)


@triton.jit
def _with_tile(q, k, v, k_scale, v_scale, m, l, o, keys, last_key, positions, scale, WINDOW: tl.constexpr):
    """Return the running softmax (m, l, o) of q's rows after a tile of keys, up to each row's position."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale  # [rows, keys], "ieee": fp32 without tf32
    if k_scale is not None:
        scores *= k_scale[None, :]
    visible = (keys < last_key)[None, :] & (keys[None, :] <= positions[:, None])
    if WINDOW:
        visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(m, tl.max(scores, 1))
    shrink = tl.exp(m - largest)
    weights = tl.exp(scores - largest[:, None])
    l = l * shrink + tl.sum(weights, 1)
    v = v.to(q.dtype)
    if v_scale is not None:
        if q.dtype == tl.float16:  # which has few numbers below 2^-14, so the scale must not make weights smaller
            v, v_scale = v * 0.015625, v_scale * 64
        weights *= v_scale[None, :]
    o = o * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return largest, l, o


@triton.jit
def _over_tiles(
    q, m, l, o, k_pages, v_pages, k_scales, v_scales, block_table, positions, kv_head, first_key, last_key, scale,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Continue the running softmax of q's rows over keys first_key .. last_key - 1, TILE at a time, up to each row's position.

    q: [rows, HEAD_DIM padded]. m, l, o: those of earlier keys, or of `_no_keys`. A row attends to at most WINDOW keys. 0: no
    window.
    """
    dims = tl.arange(0, q.shape[1])
    for first in range(first_key, last_key, TILE):
        keys = first + tl.arange(0, TILE)
        k, v, k_scale, v_scale = _load_tile(
            k_pages, v_pages, k_scales, v_scales, block_table, kv_head, keys, last_key, dims, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM
        )  # fmt: skip
        m, l, o = _with_tile(q, k, v, k_scale, v_scale, m, l, o, keys, last_key, positions, scale, WINDOW)
    return m, l, o


@triton.jit
def _no_keys(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return the running softmax of rows without keys: m [ROWS], l [ROWS], o [ROWS, DIM] in fp32."""
    m = tl.full([ROWS], -1e30, tl.float32)  # finite, because a row may find no key of its window in a tile
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit(do_not_specialize=["first_seq", "table_stride"])  # they change often, and must not recompile
def _prefill_kernel(
    q, k_pages, v_pages, k_scales, v_scales, out, query_start_loc, seq_lens, block_tables, sinks,
    q_stride, table_stride, first_seq, scale,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS queries of one sequence and one head per program, skipping keys that no query attends to."""
    seq = first_seq + tl.program_id(0)
    start = tl.load(query_start_loc + seq).to(tl.int32)
    num_queries = tl.load(query_start_loc + seq + 1).to(tl.int32) - start
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    first = tl.program_id(1) * ROWS
    head = tl.program_id(2)
    if first < num_queries:
        queries = first + tl.arange(0, ROWS)
        positions = tl.minimum(seq_len - num_queries + queries, seq_len - 1)  # rows beyond the end need some key: 0 / 0
        dims = tl.arange(0, DIM)
        inside = (queries[:, None] < num_queries) & (dims[None, :] < HEAD_DIM)
        tokens = (start + queries).to(tl.int64)
        tile = tl.load(q + tokens[:, None] * q_stride + head * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        last_key = tl.minimum(seq_len, seq_len - num_queries + first + ROWS)
        first_key = 0
        if WINDOW:
            first_key = tl.maximum(seq_len - num_queries + first - WINDOW + 1, 0)
        m, l, o = _no_keys(ROWS, DIM)
        m, l, o = _over_tiles(
            tile, m, l, o, k_pages, v_pages, k_scales, v_scales, block_tables + seq * table_stride, positions,
            head // (NUM_HEADS // NUM_KV_HEADS), first_key, last_key, scale, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE, WINDOW,
        )  # fmt: skip
        if sinks is not None:
            sink = tl.load(sinks + head)
            largest = tl.maximum(m, sink)
            l = l * tl.exp(m - largest) + tl.exp(sink - largest)
            o = o * tl.exp(m - largest)[:, None]
        where = (tokens[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
        tl.store(out + where, (o / l[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _num_queries(first_decodes, decode, num_decodes, QUERIES: tl.constexpr):
    """Return how many decodes from this one on a program computes: up to QUERIES of its sequence, 0 if an earlier one does.

    QUERIES is a power of 2. The decodes of a sequence are computed in parts of so many, from its first one on.
    """
    first = tl.load(first_decodes + decode)
    decodes = decode + tl.arange(0, QUERIES)
    firsts = tl.load(first_decodes + decodes, mask=decodes < num_decodes, other=-1)
    is_first_of_part = (decode - first) % QUERIES == 0
    return tl.where(is_first_of_part, tl.sum(tl.where(firsts == first, 1, 0), 0), 0)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q, k_pages, v_pages, k_scales, v_scales, partial_m, partial_l, partial_o, seq_lens, block_tables, first_decodes,
    q_stride, table_stride, scale,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Attend over one split of a sequence's keys per program, with the queries of the heads that share a KV head.

    With drafts, they are the queries of up to QUERIES decodes. The rows after them pad them to the minimum of tensor cores.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_queries = 1
    if first_decodes is not None:
        num_queries = _num_queries(first_decodes, seq, tl.num_programs(0), QUERIES)
        if num_queries == 0:
            return
    seq_len = tl.load(seq_lens + seq + (num_queries - 1)).to(tl.int32)  # of the last query, which sees the most keys
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - (num_queries - 1) - WINDOW, 0)
    split_size = tl.cdiv(tl.cdiv(seq_len - begin, NUM_SPLITS), TILE) * TILE
    first_key = begin + split * split_size
    last_key = tl.minimum(first_key + split_size, seq_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    heads, queries = kv_head * GROUP + rows, seq
    if first_decodes is not None:
        heads, queries = kv_head * GROUP + rows % GROUP, seq + rows // GROUP
    inside = (rows[:, None] < GROUP * num_queries) & (dims[None, :] < HEAD_DIM)
    where = queries * q_stride + heads * HEAD_DIM
    tile = tl.load(q + where[:, None] + dims[None, :], mask=inside, other=0.0)
    positions = tl.zeros([ROWS], tl.int32) + seq_len - 1
    if first_decodes is not None:  # rows that pad see what the last query sees
        positions = seq_len - num_queries + tl.minimum(rows // GROUP, num_queries - 1)
    m, l, o = _no_keys(ROWS, DIM)
    m, l, o = _over_tiles(
        tile, m, l, o, k_pages, v_pages, k_scales, v_scales, block_tables + seq * table_stride, positions, kv_head,
        first_key, last_key, scale, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE, WINDOW,
    )  # fmt: skip
    where = (queries * NUM_HEADS + heads) * NUM_SPLITS + split
    tl.store(partial_m + where, m, mask=rows < GROUP * num_queries)
    tl.store(partial_l + where, l, mask=rows < GROUP * num_queries)
    tl.store(partial_o + where[:, None] * HEAD_DIM + dims[None, :], o, mask=inside)


@triton.jit
def _merged(
    partial_m, partial_l, partial_o, sinks, row,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one sequence: scale their m, l and o to the largest m and add. Returns [DIM].

    The splits are added in turn. Several threads may have the same sum, whose order of additions tl.sum does not promise.
    """
    dims = tl.arange(0, DIM)
    largest = tl.max(tl.load(partial_m + row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)), 0)
    if sinks is not None:
        sink = tl.load(sinks + row % NUM_HEADS)
        largest = tl.maximum(largest, sink)
    total, sums = 0.0, tl.zeros([DIM], dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        at = row * NUM_SPLITS + split
        shrink = tl.exp(tl.load(partial_m + at) - largest)  # 0 for a split without keys
        total += tl.load(partial_l + at) * shrink
        sums += tl.load(partial_o + at * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0) * shrink
    if sinks is not None:
        total += tl.exp(sink - largest)
    return sums / total


@triton.jit
def _merge_kernel(
    partial_m, partial_l, partial_o, out, sinks,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head of one sequence per program."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM)
    merged = _merged(partial_m, partial_l, partial_o, sinks, row, NUM_HEADS, HEAD_DIM, DIM, NUM_SPLITS)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


class TritonBackend:
    """The default backend on a GPU. It supports any dtype and block size."""

    layout: Layout = "NHD"
    default_block_size = 16
    supports_cuda_graph = True
    supports_int8_cache = True
    supports_prompt_graph = True
    supports_windows = True
    supports_sinks = True

    num_splits: int | None = None  # of the keys of a decode. None: as many as keep the GPU busy (num_splits_for)

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect: Triton compiles a kernel when it is first called, and keeps it on disk."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"it runs on cuda only, not on {device} (TRITON_INTERPRET=1 emulates it on a CPU, slowly)"
        if device.type != "cuda" and dtype is torch.bfloat16:
            return "Triton's interpreter does not support bfloat16"
        return None if head_dim <= MAX_HEAD_DIM else f"it supports a head_dim up to {MAX_HEAD_DIM}, not {head_dim}"

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        step = partial(paged_attention, cache, replace(metadata, block_tables=metadata.block_tables.int()))
        return step if self.num_splits is None else partial(step, num_splits=self.num_splits)


def num_splits_for(num_seqs: int, num_kv_heads: int, max_seq_len: int) -> int:
    """Return the number of splits of a decode: a power of 2 that keeps the GPU busy, and less than two per tile of keys.

    >>> num_splits_for(1, 8, 4096), num_splits_for(1, 8, 100), num_splits_for(256, 8, 4096)
    (32, 2, 1)
    """
    num_splits = 1
    while (
        num_splits < _MAX_SPLITS
        and num_splits * num_seqs * num_kv_heads < _TARGET_PROGRAMS
        and num_splits * _TILE < max_seq_len
    ):
        num_splits *= 2
    return num_splits


def paged_attention(
    cache: KVCache,
    metadata: AttentionMetadata,
    layer: int,
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    window: Window = None,
    sinks: Sinks = None,
    rotation: Rotation | None = None,
    num_splits: int | None = None,
) -> Queries:
    """Store k and v, then attend for the decoding sequences and for the prompt chunks.

    Args:
        rotation: applied to q and k before.
        num_splits: as in TritonBackend.
    """
    pages: Pages = *cache.layer(layer), *cache.scales(layer)
    q, k, v = (with_whole_heads(x) for x in (q, k, v))
    q = rotate_and_store(q, rotation, k, v, *pages[:2], metadata.slot_mapping, *pages[2:])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    n, sinks = metadata.num_decodes, None if sinks is None else sinks.float().contiguous()
    if n:
        decode(q[:n], pages, out[:n], metadata, window or 0, sinks, num_splits)
    if n < len(metadata.seq_lens):
        prefill(q, pages, out, metadata, window or 0, sinks)
    return out


def rotate_and_store(q: Queries, rotation: Rotation | None, *stored: Tensor | None) -> Queries:
    """Rotate q and k (None: they stay as they are), and copy each token's k and v into its slot. Returns q.

    stored: k, v, the pages of both, the slots, and the scales of both, if there are any. Without them there is only q.
    """
    num_tokens, num_heads, head_dim = q.shape
    k, v, k_pages, v_pages, slots, *scales = stored or (None,) * 5
    num_kv_heads, strides, block_size = 1, (0, 0), 1
    if k is not None and v is not None and k_pages is not None:
        num_kv_heads, strides, block_size = k.shape[1], (k.stride(0), v.stride(0)), k_pages.shape[1]
    out = q if rotation is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    heads, kv_heads, dim = map(triton.next_power_of_2, (num_heads, num_kv_heads, head_dim))
    *tensors, zero_centred = rotation or (*(None,) * 7, False)
    num_rotated = head_dim if rotation is None else rotation.cos.shape[-1]
    _store_kernel[(num_tokens,)](
        q, k, v, out, k_pages, v_pages, slots, *(scales or (None,) * 2), *tensors, q.stride(0), *strides,
        num_heads, heads, num_kv_heads, kv_heads, head_dim, dim, block_size, num_rotated, zero_centred,
        num_warps=min(max(heads * dim // 1024, 4), 16),
    )  # fmt: skip
    return out


def copy_blocks(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks in all layers by one kernel. pages: the keys and values of all layers, [2 * layers, num_blocks, ...]."""
    size, copies = pages[0, 0].numel(), max(triton.next_power_of_2(len(sources)), _MIN_COPIES)
    tile = max(_COPIED_NUMBERS // copies, 1)
    grid = (triton.cdiv(size, tile), len(pages))  # the second axis has at most 65,535 programs
    _copy_kernel[grid](pages, sources, targets, len(sources), pages.stride(0), copies, size, tile)


def prefill(q: Tensor, pages: Pages, out: Tensor, metadata: AttentionMetadata, window: int, sinks: Sinks) -> None:
    """Attend for the prompt chunks, and write their rows of `out`. window: in tokens. 0: no window."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = pages[0].shape
    first_seq = metadata.num_decodes
    dim, tile, num_warps = _tile_sizes(q)
    rows = min(tile, max(triton.next_power_of_2(metadata.max_query_len), _MIN_ROWS))
    grid = (len(metadata.seq_lens) - first_seq, triton.cdiv(metadata.max_query_len, rows), num_heads)
    _prefill_kernel[grid](
        q, *pages, out, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables, sinks,
        q.stride(0), metadata.block_tables.stride(0), first_seq, head_dim**-0.5,
        block_size, num_heads, num_kv_heads, head_dim, dim, rows, tile, window,
        **_launch_options(q, pages, num_warps, is_prefill=True),
    )  # fmt: skip


def decode(
    q: Tensor,
    pages: Pages,
    out: Tensor,
    metadata: AttentionMetadata,
    window: int,
    sinks: Sinks,
    num_splits: int | None = None,
) -> None:
    """Attend for the decoding sequences, and write `out`, which has a row per sequence.

    Args:
        window: in tokens. 0: no window.
        num_splits: as in TritonBackend.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = pages[0].shape
    queries, rows, dim, tile = row_and_tile_sizes(q, num_kv_heads, metadata.max_num_decodes)
    most_keys = min(metadata.max_seq_len, window or metadata.max_seq_len)
    num_splits = num_splits or num_splits_for(triton.cdiv(num_seqs, queries), num_kv_heads, most_keys)
    # Two allocations: in one, 14 heads would move the second off 16 bytes, and Triton would compile again.
    m, l = (q.new_empty(num_seqs, num_heads, num_splits, dtype=torch.float32) for _ in range(2))
    o = q.new_empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32)
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q, *pages, m, l, o, metadata.seq_lens, metadata.block_tables, metadata.first_decodes if queries > 1 else None,
        q.stride(0), metadata.block_tables.stride(0), head_dim**-0.5,
        block_size, num_heads, num_kv_heads, head_dim, dim, rows, tile, num_splits, window, queries,
        **_launch_options(q, pages, 4, is_prefill=False),
    )  # fmt: skip
    _merge_kernel[(num_seqs * num_heads,)](m, l, o, out, sinks, num_heads, head_dim, dim, num_splits)


def _launch_options(q: Tensor, pages: Pages, num_warps: int, *, is_prefill: bool) -> dict[str, int]:
    """Return the options of a kernel that reads pages. num_warps: without scales.

    A tile of integers is widened in registers. With these options they suffice (tests/simulated_gpu.py), and three programs
    that decode fit a processor.
    """
    if pages[2] is None:
        return {"num_warps": num_warps}
    if q.element_size() > 2 or not uses_tensor_cores():
        return {"num_warps": 2 * num_warps, "num_stages": 1}
    return {"num_warps": 2 * num_warps} if is_prefill else {"num_warps": num_warps, "maxnreg": 168}


def _tile_sizes(q: Tensor) -> tuple[int, int, int]:
    """Return head_dim, padded to a power of 2 that tensor cores support, the tokens in a tile, and the warps of a prefill.

    A tile must fit into the registers of its program, because registers beyond them are kept in memory, up to 10 KB a thread
    without tensor cores. These do not multiply fp32 exactly. tests/simulated_gpu.py shows what a compiled kernel takes.
    """
    dim = max(triton.next_power_of_2(q.shape[2]), _MIN_ROWS)
    tile = _TILE // (2 if dim > _WIDE else 1)
    return (dim, tile, 4) if q.element_size() == 2 and uses_tensor_cores() else (dim, tile // 2, 8)


def row_and_tile_sizes(q: Tensor, num_kv_heads: int, most: int) -> tuple[int, int, int, int]:
    """Return how many of a sequence's decodes a program computes, to how many rows it pads them, and head_dim and a tile.

    most: the most decodes that a sequence has. The first number is the next power of 2, if its rows fit into half of a tile.
    Without tensor cores it is 1: the rows take all registers of a GPU, which the interpreter does not have.
    """
    dim, tile, num_warps = _tile_sizes(q)
    group = triton.next_power_of_2(q.shape[1] // num_kv_heads)
    has_room = num_warps == 4 or architecture() is None
    queries = min(triton.next_power_of_2(most), max(tile // 2 // group, 1)) if has_room else 1
    return queries, max(queries * group, _MIN_ROWS), dim, tile


def uses_tensor_cores() -> bool:
    """Whether Triton multiplies 16-bit numbers on tensor cores, which it does from sm_80 on."""
    return (architecture() or 80) >= 80


def architecture() -> int | None:
    """The architecture of the current GPU, such as 90 for sm_90. None: Triton's interpreter, or no GPU of NVIDIA."""
    if not isinstance(_prefill_kernel, JITFunction):  # interpreted
        return None
    return _architecture_of(triton.runtime.driver.active, triton.runtime.driver.active.get_current_device())


@cache
def _architecture_of(driver: Any, device: int) -> int | None:
    """As `architecture`. Cached, because the driver reads all properties of the device."""
    target = driver.get_current_target()
    return int(target.arch) if target.backend == "cuda" else None
