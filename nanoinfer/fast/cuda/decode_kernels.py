"""Triton kernels for decode steps of up to MAX_ROWS rows: with them a decoder layer is five launches, where it was nine.

In: the rows of a step, a layer's weights, the KV cache. Out: what the plain modules give, in the same dtype.

    decode_linear      q, k and v with the norm before them
    decode_attention   norms and rotation of q and k, the store, the attention, and the merge of its splits
    decode_linear      o and the residual
    decode_linear      gate and up with the norm before them, silu(gate) * up
    decode_linear      down and the residual

Gemma 3 has two more, the norms after o and down, each of which adds the residual (fused_kernels.py).

With one row a GPU's step is bound by reading weights and by the start of each kernel (2.8 us on an H100). So there are few
kernels, and each begins with what it can do early, while the one before it still runs (programmatic dependent launch, PDL):

    load weights, old keys             # what no earlier kernel of the step writes
    gdc_launch_dependents()            # the next kernel may start
    gdc_wait()                         # all earlier kernels have ended, and what they wrote is visible
    load activations, compute, store

The rule: before the wait a program reads only what no earlier kernel of the step writes, and writes nothing. Every program
waits, so that what has waited for a kernel has waited for all before it. tests/emulated_gpu checks the rule.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.attention.dense import Keys, Queries, Sinks, with_whole_heads
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.triton import (
    Pages,
    Rotation,
    _load_scale,
    _load_tile,
    _merged,
    _no_keys,
    _num_queries,
    _over_tiles,
    _rotated,
    _store_heads,
    _to_integers,
    _with_tile,
    architecture,
    num_splits_for,
    row_and_tile_sizes,
    uses_tensor_cores,
)
from nanoinfer.fast.cuda import pdl
from nanoinfer.fast.cuda.fused_kernels import Norm
from nanoinfer.fast.cuda.linear_kernel import Arrivals, _store_outputs

try:
    from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
    from triton.language.extra.cuda import gdc_wait as gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

MAX_ROWS = 4
_TILE_BYTES = 2**14  # weights that a program loads before it waits, 128 bytes a thread
_MAX_TILE = 4096  # inputs at a time. A layer with more takes half of it, because each program reads all of x
_MIN_PROGRAMS = 512  # about four for each processor of an H100
_MAX_SPLITS = 16


@triton.jit
def _load_weights(starts, inputs, inside, NUM_IN: tl.constexpr):
    """Return a tile of weights, [columns, inputs]. starts: where the weights of each column begin."""
    return tl.load(starts + inputs[None, :], mask=inside[:, None] & (inputs < NUM_IN)[None, :], other=0.0)


@triton.jit
def _sum_of_squares(x, NUM_IN: tl.constexpr, TILE: tl.constexpr):
    total = 0.0
    for first in tl.static_range(0, NUM_IN, TILE):
        inputs = first + tl.arange(0, TILE)
        a = tl.load(x + inputs, mask=inputs < NUM_IN, other=0.0).to(tl.float32)
        total += tl.sum(a * a, 0)
    return total


@triton.jit
def _decode_linear_kernel(
    x, norm, weight, bias, residual, out, eps, x_stride, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of all rows. GATED: the weight has the rows of the gate, and after them those of up.

    Products of 16-bit numbers are exact in fp32, so a row has the same bits in any number of rows.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < NUM_OUT
    starts = weight + columns[:, None].to(tl.int64) * NUM_IN
    up_starts = starts + NUM_OUT * NUM_IN
    inputs = tl.arange(0, TILE)
    w = _load_weights(starts, inputs, inside, NUM_IN)
    if GATED:
        up_w = _load_weights(up_starts, inputs, inside, NUM_IN)
    if norm is not None:
        scale = _load_scale(norm, inputs, inputs < NUM_IN, ZERO_CENTRED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, NUM_IN, TILE):
        inputs = first + tl.arange(0, TILE)
        if first > 0:
            w = _load_weights(starts, inputs, inside, NUM_IN)
            if GATED:
                up_w = _load_weights(up_starts, inputs, inside, NUM_IN)
            if norm is not None:
                scale = _load_scale(norm, inputs, inputs < NUM_IN, ZERO_CENTRED)
        for row in range(num_rows):
            a = tl.load(x + row * x_stride + inputs, mask=inputs < NUM_IN, other=0.0).to(tl.float32)
            if norm is not None:
                squares = tl.sum(a * a, 0) if NUM_IN <= TILE else _sum_of_squares(x + row * x_stride, NUM_IN, TILE)
                a = (scale * (a * tl.rsqrt(squares / NUM_IN + eps))).to(x.dtype.element_ty).to(tl.float32)
            is_row = (rows == row)[:, None]
            total += tl.where(is_row, tl.sum(w.to(tl.float32) * a[None, :], 1)[None, :], 0.0)
            if GATED:
                up += tl.where(is_row, tl.sum(up_w.to(tl.float32) * a[None, :], 1)[None, :], 0.0)
    _store_outputs(total, up, bias, residual, out, rows, columns, num_rows, NUM_OUT, GATED, ACTIVATION)


@triton.jit
def _new_keys(seq_lens, slots, table, seq_len, num_rows, BLOCK_SIZE: tl.constexpr, MAX_ROWS: tl.constexpr):
    """Return the position of each row's key of this step, and whether the row with this table and length sees it."""
    others = tl.arange(0, MAX_ROWS)
    new_keys = tl.load(seq_lens + others, mask=others < num_rows, other=0).to(tl.int32) - 1
    is_before = (others < num_rows) & (new_keys < seq_len)
    blocks = tl.load(table + new_keys // BLOCK_SIZE, mask=is_before, other=0)
    new_slots = tl.load(slots + others, mask=is_before, other=-1)
    return new_keys, is_before & (blocks.to(tl.int64) * BLOCK_SIZE + new_keys % BLOCK_SIZE == new_slots)


@triton.jit
def _queries(
    q, row, first_decodes, num_queries, seq_len, cos, sin, weight, eps, factor, q_stride, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Return a program's queries, [ROWS, DIM], normed and rotated, and the position of each. q: where the first row's begin."""
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)[None, :]
    if first_decodes is None:
        positions = tl.zeros([ROWS], tl.int32) + seq_len - 1
        query = _rotated(
            q, row, cos, sin, weight, eps, factor, heads[:, None], dims, GROUP, HEAD_DIM, ROTATED, ZERO_CENTRED
        )  # fmt: skip
    else:
        index = tl.minimum(heads // GROUP, num_queries - 1)  # of each row's query. Rows that pad have the last one
        positions = seq_len - num_queries + index
        index = index[:, None]
        query = _rotated(
            q + index * q_stride, row + index, cos, sin, weight, eps, factor, heads[:, None] % GROUP, dims, GROUP, HEAD_DIM,
            ROTATED, ZERO_CENTRED,
        )  # fmt: skip
    return query, positions


@triton.jit
def _with_new_keys(
    query, m, l, o, k, v, k_pages, v_pages, k_scales, v_scales, slots, row, num_queries, positions, kv_head, new_keys, is_seen,
    cos, sin, k_weight, k_eps, k_stride, v_stride, num_rows, scale, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, ROTATED: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """Add the keys of this step that a program's rows see to their running softmax, and store the rows' own."""
    dims = tl.arange(0, o.shape[1])[None, :]
    others = tl.arange(0, new_keys.shape[0])
    columns = kv_head * HEAD_DIM + dims
    inside = dims < HEAD_DIM
    for other in range(num_rows):
        if tl.sum(tl.where((others == other) & is_seen, 1, 0), 0) > 0:
            one = tl.arange(0, 1)[:, None]
            key = _rotated(
                k + other * k_stride + kv_head * HEAD_DIM, other, cos, sin, k_weight, k_eps, None, one, dims, 1, HEAD_DIM,
                ROTATED, ZERO_CENTRED,
            )  # fmt: skip
            value = tl.load(v + other * v_stride + columns, mask=inside, other=0.0).to(tl.float32)
            num_bad = tl.sum(tl.where(tl.abs(value) < float("inf"), 0, 1), 1)  # as kv_cache.finite_values
            is_finite = (num_bad == 0)[:, None]
            key = tl.where(is_finite, key, float("nan"))
            value = tl.where(is_finite, value, 0.0)
            seen_key, seen_value = key, value
            if k_scales is not None:  # as later queries read them
                k_integers, k_scale = _to_integers(key)
                v_integers, v_scale = _to_integers(value)
                seen_key, seen_value = k_integers * k_scale[:, None], v_integers * v_scale[:, None]
            score = tl.sum(tl.where(inside, query * seen_key, 0.0), 1) * scale
            if QUERIES > 1:
                position = tl.sum(tl.where(others == other, new_keys, 0), 0)
                is_visible = position <= positions
                if WINDOW:
                    is_visible = is_visible & (position > positions - WINDOW)
                score = tl.where(is_visible, score, float("-inf"))
            largest = tl.maximum(m, score)
            shrink = tl.exp(m - largest)
            added = tl.exp(score - largest)
            l = l * shrink + added
            o = o * shrink[:, None] + added[:, None] * seen_value
            m = largest
            if (other >= row) & (other < row + num_queries):
                slot, head = tl.load(slots + other), kv_head + one
                _store_heads(k_pages, k_scales, key, slot, head, columns, inside, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
                _store_heads(v_pages, v_scales, value, slot, head, columns, inside, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return m, l, o


@triton.jit
def _merge_if_last(
    m, l, o, partial_m, partial_l, partial_o, num_arrived, out, sinks, row, num_queries, kv_head, split,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a split's part of the softmax. The last program of some rows and a KV head merges all parts."""
    heads = tl.arange(0, o.shape[0])  # of the first row, then of the next
    dims = tl.arange(0, o.shape[1])
    is_there = heads < GROUP * num_queries
    where = ((row + heads // GROUP) * NUM_HEADS + kv_head * GROUP + heads % GROUP) * NUM_SPLITS + split
    tl.store(partial_m + where, m, mask=is_there)
    tl.store(partial_l + where, l, mask=is_there)
    inside = is_there[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(partial_o + where[:, None] * HEAD_DIM + dims[None, :], o, mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them counts
    counter = num_arrived + row * (NUM_HEADS // GROUP) + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_SPLITS - 1:
        for head in range(GROUP * num_queries):
            at = (row + head // GROUP) * NUM_HEADS + kv_head * GROUP + head % GROUP
            merged = _merged(partial_m, partial_l, partial_o, sinks, at, NUM_HEADS, HEAD_DIM, o.shape[1], NUM_SPLITS)
            tl.store(out + at * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def _decode_attention_kernel(
    q, k, v, out, k_pages, v_pages, k_scales, v_scales, slots, seq_lens, block_tables, first_decodes, cos, sin, weight, eps,
    k_weight, k_eps, factor, sinks, partial_m, partial_l, partial_o, num_arrived, q_stride, k_stride, v_stride, table_stride,
    num_rows, scale, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, MAX_ROWS: tl.constexpr, ROTATED: tl.constexpr, ZERO_CENTRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend over one split of a row's keys per program, with the queries that share a KV head. The last program merges.

    The pages have the old keys, and `k` those of this step. The last split stores the row's own, and attends to those that the
    row sees: its own, and in a sequence with drafts those of the rows before it. Their slots are in the row's block table. A
    program computes up to QUERIES rows of such a sequence, as `_decode_kernel` does.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_queries = 1
    if first_decodes is not None:
        num_queries = _num_queries(first_decodes, row, num_rows, QUERIES)
    table = block_tables + row * table_stride
    seq_len = tl.load(seq_lens + row + tl.maximum(num_queries, 1) - 1).to(tl.int32)
    new_keys, is_seen = _new_keys(seq_lens, slots, table, seq_len, num_rows, BLOCK_SIZE, MAX_ROWS)
    num_old = tl.min(tl.where(is_seen, new_keys, seq_len), 0)
    if first_decodes is not None:  # a program without queries waits like all others, and reads no keys
        num_old = tl.where(num_queries > 0, num_old, 0)
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - (num_queries - 1) - WINDOW, 0)
    split_size = tl.cdiv(tl.cdiv(tl.maximum(num_old - begin, 0), NUM_SPLITS), TILE) * TILE
    first_key, last_key = begin + split * split_size, tl.minimum(begin + (split + 1) * split_size, num_old)
    keys = first_key + tl.arange(0, TILE)
    k_tile, v_tile, k_scale, v_scale = _load_tile(
        k_pages, v_pages, k_scales, v_scales, table, kv_head, keys, last_key, tl.arange(0, DIM), BLOCK_SIZE, NUM_KV_HEADS,
        HEAD_DIM,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if first_decodes is not None and num_queries == 0:
        return
    query, positions = _queries(
        q + row * q_stride + kv_head * GROUP * HEAD_DIM, row, first_decodes, num_queries, seq_len, cos, sin, weight, eps,
        factor, q_stride, GROUP, HEAD_DIM, DIM, ROWS, ROTATED, ZERO_CENTRED,
    )  # fmt: skip
    tile = query.to(q.dtype.element_ty)
    m, l, o = _no_keys(ROWS, DIM)
    m, l, o = _with_tile(tile, k_tile, v_tile, k_scale, v_scale, m, l, o, keys, last_key, positions, scale, WINDOW)
    m, l, o = _over_tiles(
        tile, m, l, o, k_pages, v_pages, k_scales, v_scales, table, positions, kv_head, first_key + TILE, last_key, scale,
        BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, TILE, WINDOW,
    )  # fmt: skip
    if split == NUM_SPLITS - 1:
        m, l, o = _with_new_keys(
            query, m, l, o, k, v, k_pages, v_pages, k_scales, v_scales, slots, row, num_queries, positions, kv_head, new_keys,
            is_seen & (new_keys >= begin), cos, sin, k_weight, k_eps, k_stride, v_stride, num_rows, scale, BLOCK_SIZE,
            NUM_KV_HEADS, HEAD_DIM, QUERIES, WINDOW, ROTATED, ZERO_CENTRED,
        )  # fmt: skip
    _merge_if_last(
        m, l, o, partial_m, partial_l, partial_o, num_arrived, out, sinks, row, num_queries, kv_head, split, NUM_HEADS, GROUP,
        HEAD_DIM, NUM_SPLITS,
    )  # fmt: skip


def supports(x: Tensor, linear: nn.Linear, norm: Norm | None = None) -> bool:
    """Whether decode_linear computes a layer for these rows: few, with contiguous weights, all of the same dtype."""
    read = [linear.weight, *(() if linear.bias is None else (linear.bias,)), *(() if norm is None else (norm.weight,))]
    has_rows = x.ndim == 2 and len(x) <= MAX_ROWS and x.stride(1) == 1 and x.element_size() <= 4
    return has_rows and all(tensor.dtype is x.dtype and tensor.is_contiguous() for tensor in read)


def columns_and_tile(num_out: int, num_in: int, num_bits: int, tile_bytes: int = _TILE_BYTES) -> tuple[int, int]:
    """Return the columns of a program of a linear layer, and its inputs at a time.

    num_bits: of the weights of an input and a column. tile_bytes: of the weights that a program loads before it waits.
    """
    tile = triton.next_power_of_2(num_in) if num_in <= _MAX_TILE else _MAX_TILE // 2
    columns = max(tile_bytes // (tile * num_bits // 8), 1)
    while columns > 1 and num_out >= _MIN_PROGRAMS > triton.cdiv(num_out, columns):
        columns //= 2
    return columns, tile


def supports_attention(q: Queries, metadata: AttentionMetadata) -> bool:
    """Whether decode_attention computes a step: few decodes, no prompt, and products on tensor cores.

    Other products take all registers of a GPU, which the interpreter does not have.
    """
    is_fast = uses_tensor_cores() and (q.element_size() == 2 or architecture() is None)
    return is_fast and len(q) <= MAX_ROWS and metadata.num_decodes == len(q)


def decode_linear(
    x: Float[Tensor, "num_tokens in"],
    weight: Float[Tensor, "rows in"],
    bias: Float[Tensor, " rows"] | None,
    *,
    norm: Norm | None = None,
    residual: Float[Tensor, "num_tokens out"] | None = None,
    gated: bool = False,
    activation: str = "silu",
    in_place: bool = False,
) -> Float[Tensor, "num_tokens out"]:
    """Compute a linear layer for x that `supports` accepts. All tensors but x are contiguous.

    Args:
        weight: its rows are the outputs. If gated, those of the gate and then as many of up.
        norm: of x, before the product. None: no norm.
        residual: added to the outputs.
        gated: activation(gate) * up is returned.
        activation: "silu" or "gelu_tanh".
        in_place: the result is written over the residual.
    """
    num_out, num_in = len(weight) // (1 + gated), weight.shape[1]
    columns, tile = columns_and_tile(num_out, num_in, 8 * x.element_size() * (1 + gated))
    out = x.new_empty(len(x), num_out) if residual is None or not in_place else residual
    scale, eps, zero_centred = norm or (None, 0.0, False)
    _launch(
        _decode_linear_kernel, (triton.cdiv(num_out, columns),),
        x, scale, weight, bias, residual, out, eps, x.stride(0), len(x), num_in, num_out, gated, activation,
        zero_centred, MAX_ROWS, columns, tile,
    )  # fmt: skip
    return out


def decode_attention(
    cache: KVCache,
    metadata: AttentionMetadata,
    layer: int,
    q: Queries,
    k: Keys,
    v: Keys,
    rotation: Rotation,
    arrivals: Arrivals,
    *,
    window: int | None = None,
    sinks: Sinks = None,
) -> Queries:
    """Compute paged_attention with a rotation, for a step that `supports_attention` accepts.

    Args:
        layer: the index of the layer in the cache.
        arrivals: the layer's counters.
        window: in tokens. None: no window.
    """
    q, k, v = (with_whole_heads(x) for x in (q, k, v))
    num_rows, num_heads, head_dim = q.shape
    pages: Pages = *cache.layer(layer), *cache.scales(layer)
    _, block_size, num_kv_heads, _ = pages[0].shape
    most_keys = min(metadata.max_seq_len, window or metadata.max_seq_len)
    queries, rows, dim, tile = row_and_tile_sizes(q, num_kv_heads, min(metadata.max_num_decodes, MAX_ROWS))
    num_splits = min(num_splits_for(triton.cdiv(num_rows, queries), num_kv_heads, most_keys), _MAX_SPLITS)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, l = (q.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32) for _ in range(2))
    o = q.new_empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32)
    _launch(
        _decode_attention_kernel, (num_rows, num_kv_heads, num_splits),
        q, k, v, out, *pages, metadata.slot_mapping, metadata.seq_lens, metadata.block_tables,
        metadata.first_decodes if queries > 1 else None, *rotation[:-1], None if sinks is None else sinks.float().contiguous(),
        m, l, o, arrivals.counters(MAX_ROWS * num_kv_heads, q.device), q.stride(0), k.stride(0), v.stride(0),
        metadata.block_tables.stride(0), num_rows, head_dim**-0.5,
        block_size, num_heads, num_kv_heads, head_dim, dim, rows, tile, num_splits, window or 0, queries, MAX_ROWS,
        rotation.cos.shape[-1], rotation.zero_centred,
    )  # fmt: skip
    return out


def _launch(kernel: JITFunction[Any], grid: tuple[int, ...], *arguments: object) -> None:
    """Launch a kernel whose last parameter is PDL: with it on sm_90 and newer."""
    has_pdl = gdc_wait is not None and (architecture() or 0) >= 90
    uses_pdl = has_pdl and pdl.may_use(triton.runtime.driver.active.get_current_device())
    # One stage: a program has few tiles, and loads ahead would spill registers.
    kernel[grid](*arguments, uses_pdl, num_stages=1, **({"launch_pdl": True} if uses_pdl else {}))
