"""Triton kernels for a mixture of experts. No value is read back, so that a CUDA graph can capture a step with experts.

In: rows, the experts that the router has chosen for each, and their weights. Out: what Experts.weighted_sum gives. A pair is a
row and an expert that is chosen for it. Where each row has k experts, the row of a pair is pair // k.

    up to MAX_ROWS rows     a program computes some columns of one pair: the expert's gate and up, then
                            some columns of one row: the weighted sum of its experts' down
    more rows               a program lists the pairs of one expert, then
                            a program computes some columns of a tile of an expert's pairs: gate and up, then down, then
                            a program adds the pairs of a row

Few rows read the weights of chosen experts alone, as often as they are chosen. With more rows each weight is read once for a
tile of up to 64 pairs. Only the device knows which tiles there are, so there are as many programs as tiles at most, and those
without a tile end at once (the method of vLLM's fused_moe, with a list for each expert in place of a sort).

Results are rounded where the definition rounds: after the gate, and after each expert. A row's sum is in the order of its
experts in `chosen`, so its bits do not depend on other rows.
"""

from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanoinfer.attention.triton import uses_tensor_cores
from nanoinfer.fast.cuda.decode_kernels import MAX_ROWS, _launch, _load_weights, gdc_launch_dependents, gdc_wait
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.fast.trace import has_hooks
from nanoinfer.features.training.stored import StoredParameter
from nanoinfer.models.gpt_oss import ClampedSwiGLU
from nanoinfer.models.layers import Hidden, SwiGLU, Untraced
from nanoinfer.models.qwen_moe import Experts

_TILE_BYTES = 2**14  # weights that a program of few rows loads at a time
_MAX_TILE = 4096  # inputs at a time
_MIN_PROGRAMS = 512  # about four for each processor of an H100
_LISTED = 1024  # pairs at a time
# Pairs and columns of a program, inputs at a time, warps and stages. Experts with many pairs have the larger tiles.
_SMALL, _LARGE, _IN_FP32 = (16, 32, 128, 4, 3), (64, 64, 64, 4, 3), (16, 32, 32, 4, 1)


# ---- few rows


@triton.jit
def _gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return silu(gate) * up. With a limit, what ClampedSwiGLU computes of them. NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return (up + 1) * (gate * tl.sigmoid(ALPHA * gate))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _few_gated_kernel(
    x, chosen, weight, bias, out, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, TOP_K: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of one pair: the gate of its expert times up."""
    pair = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < NUM_OUT
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_row = tl.load(chosen + pair) * 2 * NUM_OUT  # of the expert's gate. Those of up follow
    starts = weight + (first_row + columns)[:, None] * NUM_IN
    gate = tl.zeros([COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS], tl.float32)
    for first in tl.static_range(0, NUM_IN, TILE):
        inputs = first + tl.arange(0, TILE)
        a = tl.load(x + pair // TOP_K * NUM_IN + inputs, mask=inputs < NUM_IN, other=0.0).to(tl.float32)
        gate += tl.sum(_load_weights(starts, inputs, inside, NUM_IN).to(tl.float32) * a[None, :], 1)
        up += tl.sum(_load_weights(starts + NUM_OUT * NUM_IN, inputs, inside, NUM_IN).to(tl.float32) * a[None, :], 1)
    if bias is not None:
        gate += tl.load(bias + first_row + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + first_row + NUM_OUT + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + pair * NUM_OUT + columns, _gated(gate, up, ALPHA, LIMIT).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _few_down_kernel(
    x, chosen, routing, weight, bias, mixed, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of one row: the sum of its experts' outputs, times their weights. x has a row for each pair."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < NUM_OUT
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        first_row = tl.load(chosen + pair) * NUM_OUT
        starts = weight + (first_row + columns)[:, None] * NUM_IN
        own = tl.zeros([COLUMNS], tl.float32)
        for first in tl.static_range(0, NUM_IN, TILE):
            inputs = first + tl.arange(0, TILE)
            a = tl.load(x + pair * NUM_IN + inputs, mask=inputs < NUM_IN, other=0.0).to(tl.float32)
            own += tl.sum(_load_weights(starts, inputs, inside, NUM_IN).to(tl.float32) * a[None, :], 1)
        if bias is not None:
            own += tl.load(bias + first_row + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(routing + pair) * own.to(x.dtype.element_ty).to(tl.float32)
    tl.store(mixed + row * NUM_OUT + columns, total, mask=inside)


# ---- more rows


@triton.jit(do_not_specialize=["num_rows"])
def _list_kernel(chosen, counts, pairs, num_rows, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Count the pairs of one expert, and list them in order. An expert has at most num_rows."""
    expert = tl.program_id(0)
    own = pairs + expert.to(tl.int64) * num_rows
    count = 0
    for first in range(0, num_rows * TOP_K, TILE):
        ids = first + tl.arange(0, TILE)
        is_own = tl.load(chosen + ids, mask=ids < num_rows * TOP_K, other=-1) == expert
        places = tl.cumsum(is_own.to(tl.int32), 0)  # from 1
        tl.store(own + count + places - 1, ids, mask=is_own)
        count += tl.sum(is_own.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit
def _tile_of(counts, number, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of ROWS pairs, the tile's first pair in the expert's list, and the list's length.

    number: of the tile, where tiles are counted in the order of their experts. If it is too large, the length is 0.
    """
    experts = tl.arange(0, EXPERTS)
    lengths = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    num_tiles = (lengths + ROWS - 1) // ROWS
    ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    is_own = experts == expert
    first = (number - tl.sum(tl.where(is_own, ends - num_tiles, 0), 0)) * ROWS
    return expert, first, tl.sum(tl.where(is_own, lengths, 0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_kernel(
    x, weight, bias, out, counts, pairs, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of up to ROWS pairs of one expert.

    GATED: the gate times up, where x has a row for TOP_K pairs. Otherwise down, and x has a row for each pair.
    """
    expert, first, count = _tile_of(counts, tl.program_id(0), NUM_EXPERTS, EXPERTS, ROWS)
    if first < count:
        places = first + tl.arange(0, ROWS)
        there = places < count
        own = tl.load(pairs + expert.to(tl.int64) * num_rows + places, mask=there, other=0).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < NUM_OUT
        first_row = expert.to(tl.int64) * NUM_OUT * (1 + GATED)
        starts = weight + (first_row + columns)[:, None] * NUM_IN
        rows = x + (own // TOP_K if GATED else own)[:, None] * NUM_IN
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, NUM_IN, TILE):
            inputs = begin + tl.arange(0, TILE)
            tile = tl.load(rows + inputs[None, :], mask=there[:, None] & (inputs < NUM_IN)[None, :], other=0.0)
            w = _load_weights(starts, inputs, inside, NUM_IN)
            total = tl.dot(tile, tl.trans(w), total, input_precision="ieee")
            if GATED:
                w = _load_weights(starts + NUM_OUT * NUM_IN, inputs, inside, NUM_IN)
                up = tl.dot(tile, tl.trans(w), up, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + first_row + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias + first_row + NUM_OUT + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total = _gated(total, up, ALPHA, LIMIT)
        where = out + own[:, None] * NUM_OUT + columns[None, :]
        tl.store(where, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _sum_pairs_kernel(x, routing, mixed, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Add the pairs of one row, times their weights, in a part of the columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    total = tl.zeros([TILE], tl.float32)
    for pair in range(row * TOP_K, row * TOP_K + TOP_K):
        own = tl.load(x + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(routing + pair) * own
    tl.store(mixed + row * SIZE + columns, total, mask=inside)


# ---- launches


class KernelExperts(Untraced):
    """Experts in kernels. The plain layers' weights become views of its weights."""

    def __init__(self, experts: Experts) -> None:
        """experts: those that `supports` accepts."""
        super().__init__()
        mlps = cast(Sequence[SwiGLU], experts)
        first = mlps[0]
        self.activation = (first.alpha, first.limit) if isinstance(first, ClampedSwiGLU) else (None, None)
        self.num_experts = len(mlps)
        self.gate_up = FusedLinear(*(linear for mlp in mlps for linear in (mlp.gate_proj, mlp.up_proj))).merged()
        self.down = FusedLinear(*(mlp.down_proj for mlp in mlps)).merged()

    def weighted_sum(self, x: Hidden, weights: Float[Tensor, "num_tokens k"], chosen: Int[Tensor, "num_tokens k"]) -> Hidden:
        return cast(Tensor, self(x, weights, chosen))

    def forward(self, x: Hidden, weights: Float[Tensor, "num_tokens k"], chosen: Int[Tensor, "num_tokens k"]) -> Hidden:
        x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
        return (self._of_few if len(x) <= MAX_ROWS else self._of_many)(x, weights, chosen)

    def _of_few(self, x: Hidden, weights: Tensor, chosen: Tensor) -> Hidden:
        (num_rows, top_k), size, inner = chosen.shape, self.down.out_features // self.num_experts, self.down.in_features
        gated, mixed = x.new_empty(num_rows * top_k, inner), x.new_empty(num_rows, size, dtype=torch.float32)
        columns, tile = _columns_and_tile(inner, x.shape[1], x.element_size() * 2, num_rows * top_k)
        _launch(
            _few_gated_kernel, (triton.cdiv(inner, columns), num_rows * top_k), x, chosen, self.gate_up.weight,
            self.gate_up.bias, gated, x.shape[1], inner, top_k, *self.activation, columns, tile,
        )  # fmt: skip
        columns, tile = _columns_and_tile(size, inner, x.element_size() * top_k, num_rows)
        _launch(
            _few_down_kernel, (triton.cdiv(size, columns), num_rows), gated, chosen, weights, self.down.weight,
            self.down.bias, mixed, inner, size, top_k, columns, tile,
        )  # fmt: skip
        return mixed

    def _of_many(self, x: Hidden, weights: Tensor, chosen: Tensor) -> Hidden:
        (num_rows, top_k), size, inner = chosen.shape, self.down.out_features // self.num_experts, self.down.in_features
        counts = torch.empty(self.num_experts, dtype=torch.int32, device=x.device)
        pairs = torch.empty(self.num_experts, num_rows, dtype=torch.int32, device=x.device)
        gated, outs = (x.new_empty(num_rows * top_k, num_out) for num_out in (inner, size))
        mixed = x.new_empty(num_rows, size, dtype=torch.float32)
        _list_kernel[(self.num_experts,)](chosen, counts, pairs, num_rows, top_k, _LISTED)
        of_pairs = counts, pairs, num_rows
        self._multiply(self.gate_up, x, gated, of_pairs, top_k, gated=True)
        self._multiply(self.down, gated, outs, of_pairs, top_k, gated=False)
        _sum_pairs_kernel[(num_rows, triton.cdiv(size, _LISTED))](outs, weights, mixed, size, top_k, _LISTED)
        return mixed

    def _multiply(
        self, linear: nn.Linear, x: Tensor, out: Tensor, of_pairs: tuple[Tensor, Tensor, int], top_k: int, *, gated: bool
    ) -> None:
        """Compute all pairs' rows of `out`, with as many programs as there are tiles at most."""
        num_pairs, num_out = out.shape
        sizes = _LARGE if num_pairs >= _LARGE[0] * self.num_experts else _SMALL
        rows, columns, tile, num_warps, num_stages = sizes if x.element_size() == 2 and uses_tensor_cores() else _IN_FP32
        num_tiles = triton.cdiv(num_pairs, rows) + min(num_pairs, self.num_experts)
        _grouped_kernel[(num_tiles, triton.cdiv(num_out, columns))](
            x, linear.weight, linear.bias, out, *of_pairs, x.shape[1], num_out, self.num_experts,
            triton.next_power_of_2(self.num_experts), top_k, gated, *self.activation, rows, columns, tile,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip


def _columns_and_tile(num_out: int, num_in: int, num_bytes: int, num_others: int) -> tuple[int, int]:
    """Return the columns of a program of few rows, and its inputs at a time.

    num_bytes: of the weights of an input and a column. num_others: the programs with the same columns.
    """
    tile = min(triton.next_power_of_2(num_in), _MAX_TILE)
    columns = max(_TILE_BYTES // (tile * num_bytes), 1)
    while columns > 1 and triton.cdiv(num_out, columns) * num_others < _MIN_PROGRAMS:
        columns //= 2
    return columns, tile


def supports(experts: Experts) -> bool:
    """Whether the kernels compute these experts: gated MLPs of one kind and size, of 16 or 32 bits, without hooks."""
    mlps = list(experts)
    parts = [[mlp, *mlp.children()] for mlp in mlps]
    first = [(type(part).forward, getattr(part, "bias", None) is None) for part in parts[0]]
    is_known = type(mlps[0]).forward in (SwiGLU.forward, ClampedSwiGLU.forward)
    are_alike = all([(type(part).forward, getattr(part, "bias", None) is None) for part in own] == first for own in parts)
    shapes = {tuple((weight.shape, weight.dtype) for weight in mlp.parameters()) for mlp in mlps}
    modules = [part for own in parts for part in own]
    are_plain = len(set(modules)) == len(modules) and not any(map(has_hooks, modules))
    is_loaded = not any(isinstance(weight, StoredParameter) for weight in experts.parameters())  # others are to be rounded
    return is_known and are_alike and are_plain and is_loaded and len(shapes) == 1


def replace_experts(model: nn.Module) -> None:
    """Let the kernels compute the experts of a copied model (trace.copied)."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts) and supports(child):
                parent.register_module(name, KernelExperts(child))
