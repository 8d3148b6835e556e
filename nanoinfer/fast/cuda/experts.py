"""Triton kernels for a mixture of experts. No value is read back, so that a CUDA graph can capture a step with experts.

In: rows, and the router's scores. Out: what the model's routing and Experts.weighted_sum give, with the residual added. A pair
is a row and an expert that is chosen for it. Where each row has k experts, the row of a pair is pair // k.

    router                  a program chooses the experts of one row
    up to MAX_ROWS rows     a program computes some columns of one pair: the expert's gate and up, then
                            some columns of one row: the weighted sum of its experts' down
    more rows               a program lists the pairs of one expert, then
                            a program computes some columns of a tile of an expert's pairs: gate and up, then down, then
                            a program adds the pairs of a row

Few rows read the weights of chosen experts alone, as often as they are chosen. With more rows each weight is read once for a
tile of up to 64 pairs. Only the device knows which tiles there are, so there are as many programs as tiles at most, and those
without a tile end at once (the method of vLLM's fused_moe, with a list for each expert in place of a sort).

Results are rounded after the gate and after each expert, as the definition rounds, and a sum with its residual once. A row's
sum is in the order of its experts in `chosen`, so its bits do not depend on other rows.
"""

from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor, fx, nn

from nanoinfer.attention.triton import uses_tensor_cores
from nanoinfer.fast.cuda.decode_kernels import (
    _MAX_TILE,
    _MIN_PROGRAMS,
    _TILE_BYTES,
    MAX_ROWS,
    _launch,
    _load_weights,
    gdc_launch_dependents,
    gdc_wait,
)
from nanoinfer.fast.fuse import ADD, FusedLinear
from nanoinfer.fast.trace import Trace, has_hooks
from nanoinfer.features.training.stored import StoredParameter
from nanoinfer.models.gpt_oss import ClampedSwiGLU, route_among_chosen
from nanoinfer.models.layers import Hidden, SwiGLU, Untraced
from nanoinfer.models.qwen_moe import Experts, route

# Inputs at a time. A thread has several, or its product in fp32 would be fused with the sum over threads, which then differ.
_MIN_TILE = 256
_LISTED = 1024  # pairs at a time
# Pairs and columns of a program, inputs at a time, warps and stages. Experts with many pairs have the larger tiles.
_SMALL, _LARGE, _IN_FP32 = (16, 32, 128, 4, 3), (64, 64, 64, 4, 3), (16, 32, 32, 4, 1)


@triton.jit
def _route_kernel(
    scores, routing, chosen, stride, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMED: tl.constexpr
):  # fmt: skip
    """Choose TOP_K different experts for one row, those of the largest scores, and of equal ones the first.

    NORMED: their weights are their shares of the softmax over the chosen. Otherwise they are those of the softmax over all.
    """
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    is_left = experts < NUM_EXPERTS
    score = tl.load(scores + row * stride + experts, mask=is_left, other=float("-inf")).to(tl.float32)
    is_bad = tl.sum(tl.where(score == score, 0, 1), 0) > 0  # NaN, which comparisons would hide
    largest = tl.max(score, 0)
    exponential = tl.exp(score - largest)  # NaN if the largest is not finite
    is_chosen = experts < 0
    places = tl.zeros([EXPERTS], tl.int32)
    for place in tl.static_range(TOP_K):
        next_score = tl.max(tl.where(is_left, score, float("-inf")), 0)
        expert = tl.min(tl.where(is_left & ((score == next_score) | is_bad), experts, EXPERTS), 0)
        places = tl.where(experts == expert, place, places)
        is_chosen = is_chosen | (experts == expert)
        is_left = is_left & (experts != expert)
    total = tl.sum(tl.where(is_chosen, exponential, 0.0) if NORMED else exponential, 0)
    weight = tl.where(is_bad, float("nan"), exponential / total)
    tl.store(routing + row * TOP_K + places, weight, mask=is_chosen)
    tl.store(chosen + row * TOP_K + places, experts.to(tl.int64), mask=is_chosen)


@triton.jit
def _store_sum(total, residual, out, where, inside):
    """Store a row's sum, or what it is with the residual."""
    if residual is not None:
        total += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)


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
    x, chosen, routing, weight, bias, residual, out, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, TOP_K: tl.constexpr,
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
    _store_sum(total, residual, out, row * NUM_OUT + columns, inside)


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
def _sum_pairs_kernel(x, routing, residual, out, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Add the pairs of one row, times their weights, in a part of the columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    total = tl.zeros([TILE], tl.float32)
    for pair in range(row * TOP_K, row * TOP_K + TOP_K):
        own = tl.load(x + pair * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(routing + pair) * own
    _store_sum(total, residual, out, row * SIZE + columns, inside)


# ---- launches


def route_by_kernel(
    scores: Float[Tensor, "num_tokens num_experts"], k: int, is_normed: bool = True
) -> tuple[Float[Tensor, "num_tokens k"], Int[Tensor, "num_tokens k"]]:
    """Compute qwen_moe.route in one kernel. With is_normed it is gpt_oss.route_among_chosen as well, but for rounding."""
    scores, num_experts = scores if scores.stride(-1) == 1 else scores.contiguous(), scores.shape[1]
    routing, chosen = (scores.new_empty(len(scores), k, dtype=dtype) for dtype in (torch.float32, torch.int64))
    _route_kernel[(len(scores),)](
        scores, routing, chosen, scores.stride(0), num_experts, triton.next_power_of_2(num_experts), k, is_normed, num_warps=1
    )  # fmt: skip
    return routing, chosen


class KernelExperts(Untraced):
    """Experts in kernels. The plain layers' weights become views of its weights."""

    def __init__(self, experts: Experts, *, is_invariant: bool = False) -> None:
        """experts: those that `supports` accepts. is_invariant: whether all numbers of rows have the same kernels and tiles."""
        super().__init__()
        self.is_invariant = is_invariant
        mlps = cast(Sequence[SwiGLU], experts)
        first = mlps[0]
        self.activation = (first.alpha, first.limit) if isinstance(first, ClampedSwiGLU) else (None, None)
        self.num_experts = len(mlps)
        self.gate_up = FusedLinear(*(linear for mlp in mlps for linear in (mlp.gate_proj, mlp.up_proj))).merged()
        self.down = FusedLinear(*(mlp.down_proj for mlp in mlps)).merged()

    def weighted_sum(self, x: Hidden, weights: Float[Tensor, "num_tokens k"], chosen: Int[Tensor, "num_tokens k"]) -> Hidden:
        return cast(Tensor, self(x, weights, chosen))

    def forward(
        self,
        x: Hidden,
        weights: Float[Tensor, "num_tokens k"],
        chosen: Int[Tensor, "num_tokens k"],
        residual: Hidden | None = None,
    ) -> Hidden:
        """Return Experts.weighted_sum, in fp32. With a residual: the sum of both, in the dtype of x."""
        x, weights, chosen = x.contiguous(), weights.contiguous(), chosen.contiguous()
        if residual is not None and (residual.dtype is not x.dtype or residual.shape != x.shape):
            return residual + self.weighted_sum(x, weights, chosen).to(x.dtype)
        residual = None if residual is None else residual.contiguous()
        out = x.new_empty(x.shape, dtype=torch.float32) if residual is None else torch.empty_like(x)
        is_few = len(x) <= MAX_ROWS and not self.is_invariant
        (self._of_few if is_few else self._of_many)(x, weights, chosen, residual, out)
        return out

    def _of_few(self, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor | None, out: Tensor) -> None:
        (num_rows, top_k), size, inner = chosen.shape, x.shape[1], self.down.in_features
        gated = x.new_empty(num_rows * top_k, inner)
        columns, tile = _columns_and_tile(inner, size, x.element_size() * 2, num_rows * top_k)
        _launch(
            _few_gated_kernel, (triton.cdiv(inner, columns), num_rows * top_k), x, chosen, self.gate_up.weight,
            self.gate_up.bias, gated, size, inner, top_k, *self.activation, columns, tile,
        )  # fmt: skip
        columns, tile = _columns_and_tile(size, inner, x.element_size() * top_k, num_rows)
        _launch(
            _few_down_kernel, (triton.cdiv(size, columns), num_rows), gated, chosen, weights, self.down.weight,
            self.down.bias, residual, out, inner, size, top_k, columns, tile,
        )  # fmt: skip

    def _of_many(self, x: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor | None, out: Tensor) -> None:
        (num_rows, top_k), size, inner = chosen.shape, x.shape[1], self.down.in_features
        counts = torch.empty(self.num_experts, dtype=torch.int32, device=x.device)
        pairs = torch.empty(self.num_experts, num_rows, dtype=torch.int32, device=x.device)
        gated, outs = (x.new_empty(num_rows * top_k, num_out) for num_out in (inner, size))
        _list_kernel[(self.num_experts,)](chosen, counts, pairs, num_rows, top_k, _LISTED)
        of_pairs = counts, pairs, num_rows
        self._multiply(self.gate_up, x, gated, of_pairs, top_k, gated=True)
        self._multiply(self.down, gated, outs, of_pairs, top_k, gated=False)
        _sum_pairs_kernel[(num_rows, triton.cdiv(size, _LISTED))](outs, weights, residual, out, size, top_k, _LISTED)

    def _multiply(
        self, linear: nn.Linear, x: Tensor, out: Tensor, of_pairs: tuple[Tensor, Tensor, int], top_k: int, *, gated: bool
    ) -> None:
        """Compute all pairs' rows of `out`, with as many programs as there are tiles at most."""
        num_pairs, num_out = out.shape
        is_large = num_pairs >= _LARGE[0] * self.num_experts and not self.is_invariant
        sizes = _LARGE if is_large else _SMALL
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
    tile = min(max(triton.next_power_of_2(num_in), _MIN_TILE), _MAX_TILE)
    columns = max(_TILE_BYTES // (tile * triton.next_power_of_2(num_bytes)), 1)
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


def fuse_experts(trace: Trace) -> int:
    """Let kernels choose the experts of a trace, and add the residual to their sum. Returns the number of these operations."""
    num_fused = 0
    for node in list(trace.graph.nodes):
        if node.target in (route, route_among_chosen):
            node.target, num_fused = route_by_kernel, num_fused + 1
        elif isinstance(trace.module(node), KernelExperts):
            num_fused += 1
            if (added := _sum_with_residual(node)) is not None:
                rounded, residual = added
                node.kwargs = {"residual": residual}
                for operation in (*rounded.users, rounded):
                    operation.replace_all_uses_with(node)
                    trace.graph.erase_node(operation)
    return num_fused


def _sum_with_residual(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the only operation that reads a sum of experts, if it rounds it to the dtype of x, and what is added to that."""
    x, rounded = node.args[0], next(iter(node.users))
    if len(node.users) > 1 or rounded.target != "to" or len(rounded.users) > 1 or len(rounded.args) != 2:
        return None
    dtype, added = rounded.args[1], next(iter(rounded.users))
    is_of_x = isinstance(dtype, fx.Node) and dtype.target is getattr and dtype.args == (x, "dtype")
    if not is_of_x or added.target not in ADD or len(added.args) != 2 or added.kwargs:
        return None
    [residual, *others] = [given for given in added.args if given is not rounded] or [None]
    order = list(node.graph.nodes)
    is_known = isinstance(residual, fx.Node) and not others and order.index(residual) < order.index(node)
    return (rounded, cast(fx.Node, residual)) if is_known else None


def replace_experts(model: nn.Module, *, is_invariant: bool) -> None:
    """Let the kernels compute the experts of a copied model (trace.copied). is_invariant: as in KernelExperts."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts) and supports(child):
                parent.register_module(name, KernelExperts(child, is_invariant=is_invariant))
