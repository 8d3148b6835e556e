"""Two Triton kernels that add the adapters of requests to a linear layer, or to several with the same input.

In: a step's rows, each with the index of its adapter. Out: the outputs of the layer, as features/adapters/layers.py has them

    shrink    x @ A_i.T, by parts of the inputs, in fp32
    expand    the sum of the parts, rounded to the model's dtype, then out += sum @ B_i.T * scale_i

for the rows of adapter i. A program has 16 rows, and multiplies them by the matrices of each adapter that one of them uses. The
memory of all matrices is allocated when the model is compiled, and adapters are written into it. So CUDA graphs replay both
kernels, whichever adapters a step uses. A row has the same bits in any batch. A step without adapters launches what the model
launches without this file, and has graphs of its own.

Source of the method: Chen et al. 2023, https://arxiv.org/abs/2310.18547, with a mask for each adapter in place of sorted rows.
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.triton import uses_tensor_cores
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import Run
from nanoinfer.fast.cuda.fused_kernels import gate_and_mul
from nanoinfer.fast.cuda.graphs import StepGraphs
from nanoinfer.features.adapters.layers import AdaptedLinear, check_rows, shape_of
from nanoinfer.features.adapters.lora import LowRankUpdate
from nanoinfer.system.transfer import integers_on_device

M = TypeVar("M", bound=nn.Module)

ROWS = 16  # the rows of a program, as many as a product of tensor cores has at least
_PART = 512  # the inputs that a program of shrink multiplies
# The inputs and the numbers of x @ A.T at a time, and the outputs of a program of expand. Without tensor cores all numbers of a
# product are in registers.
_SIZES, _SIZES_WITHOUT_TENSOR_CORES = (128, 32, 64), (32, 16, 32)


@triton.jit
def _following(indices, last):
    """Return the smallest adapter index above `last`. None is above: 2^30."""
    return tl.min(tl.where(indices > last, indices, 1 << 30), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, indices, a, products, x_stride, a_stride, num_rows, NUM_IN: tl.constexpr, NUM_RANKS: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Multiply PART inputs of the rows by RANKS rows of the A of their adapters.

    a: [adapters, NUM_RANKS, NUM_IN], of all layers. products: [parts of the inputs, num_rows, NUM_RANKS].
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    used = tl.load(indices + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    total = tl.zeros([ROWS, RANKS], tl.float32)
    adapter = _following(used, -1)
    while adapter < 1 << 30:
        matrix = a + adapter.to(tl.int64) * a_stride + ranks[:, None] * NUM_IN
        product = tl.zeros([ROWS, RANKS], tl.float32)
        for first in range(0, PART, TILE):
            inputs = tl.program_id(2) * PART + first + tl.arange(0, TILE)
            within = (inputs < NUM_IN)[None, :]
            tile = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=(used == adapter)[:, None] & within, other=0.0)
            weights = tl.load(matrix + inputs[None, :], mask=within, other=0.0)
            product = tl.dot(tile, tl.trans(weights), product, input_precision="ieee")
        total = tl.where((used == adapter)[:, None], product, total)  # a matrix that is not finite reaches its own rows alone
        adapter = _following(used, adapter)
    at = (tl.program_id(2) * num_rows + rows[:, None]) * NUM_RANKS + ranks[None, :]
    tl.store(products + at, total, mask=(used >= 0)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    products, indices, b, factors, starts, out, b_stride, factors_stride, out_stride, num_rows, NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Add the product with B to COLUMNS outputs of a layer.

    b: [adapters, outputs, RANK], of all layers. factors: [adapters, layers], each a scale_i.
    starts: the first output of each layer, and the end of the last.
    """
    layer = tl.program_id(2)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.load(starts + layer) + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < tl.load(starts + layer + 1)
    used = tl.load(indices + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    is_used = (used >= 0)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.static_range(0, RANK, RANKS):
        ranks = first + tl.arange(0, RANKS)
        at = rows[:, None] * NUM_RANKS + layer * RANK + ranks[None, :]
        shrunk = tl.zeros([ROWS, RANKS], tl.float32)
        for part in range(NUM_PARTS):
            shrunk += tl.load(products + part * num_rows.to(tl.int64) * NUM_RANKS + at, mask=is_used, other=0.0)
        tile = shrunk.to(b.dtype.element_ty)
        adapter = _following(used, -1)
        while adapter < 1 << 30:
            matrix = b + adapter.to(tl.int64) * b_stride + columns[:, None] * RANK + ranks[None, :]
            weights = tl.load(matrix, mask=inside[:, None], other=0.0)
            product = tl.dot(tile, tl.trans(weights), input_precision="ieee")
            product *= tl.load(factors + adapter * factors_stride + layer)
            total += tl.where((used == adapter)[:, None], product, 0.0)
            adapter = _following(used, adapter)
    where = out + rows[:, None] * out_stride + columns[None, :]
    mask = is_used & inside[None, :]
    tl.store(where, (tl.load(where, mask=mask, other=0.0).to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)


class RowIndices:
    """The adapter index of each row, -1 for a row without an adapter.

    Attributes:
        static, new: as in RowNumbers (graphs.py).
        can_be_off: False if all steps launch the same, so that a row has the same bits in all of them.
        is_off: whether no row has an adapter, and nothing is launched for them.
        is_static: whether kernels read `static`, as in a graph.
        indices: int64 [num_rows of the run], which kernels read.
    """

    def __init__(self, max_num_rows: int, device: torch.device, *, can_be_off: bool = True) -> None:
        self.can_be_off = can_be_off
        self.static = torch.full((max_num_rows,), -1, dtype=torch.int64, device=device)
        self.new = self.indices = self.static
        self.is_off = self.is_static = False

    def set(self, indices: list[int]) -> None:
        """Note the indices of a step's rows."""
        self.is_off = self.can_be_off and max(indices, default=-1) < 0
        if not self.is_off:
            [self.new] = integers_on_device([indices], self.static.device)

    def begin(self, model: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Choose what a run reads. It is a hook before the model's forward pass, whose first argument are the token ids."""
        self.indices = (self.static if self.is_static else self.new)[: len(arguments[0])]


class AdaptedGraphs:
    """The graphs of steps with adapters and of those without (StepGraphs), with the same inputs. options: StepGraphs'."""

    def __init__(self, info: ExecutorInfo, rows: RowIndices, **options: Any) -> None:
        self.rows = rows
        self.adapted, self.plain = StepGraphs(info, further=(rows,), **options), StepGraphs(info, **options)
        self.plain._rows = self.adapted._rows

    def try_replay(self, batch: ForwardBatch, run: Run) -> Float[Tensor, "num_tokens hidden"] | None:
        graphs = self.plain if self.rows.is_off else self.adapted
        return graphs.try_replay(batch, partial(self._run, run, is_off=self.rows.is_off))

    def prepare(self, run: Run) -> Float[Tensor, "max_num_tokens hidden"] | None:
        if self.rows.can_be_off:
            self.plain.prepare(partial(self._run, run, is_off=True))
        return self.adapted.prepare(partial(self._run, run, is_off=False))

    def capture_next(self) -> bool:
        return self.adapted.capture_next() or self.plain.capture_next()

    def drop_graphs(self) -> None:
        self.adapted.drop_graphs()
        self.plain.drop_graphs()

    def _run(self, run: Run, batch: ForwardBatch, *, is_off: bool) -> Tensor:
        """Run a batch with or without adapters, whatever the step has."""
        of_step, self.rows.is_off, self.rows.is_static = self.rows.is_off, is_off, True
        try:
            return run(batch)
        finally:
            self.rows.is_off, self.rows.is_static = of_step, False


class LowRankUpdates:
    """The adapters of linear layers with the same input, which are added to the concatenated outputs of the layers.

    a: [max_loras, layers * rank, in], where the matrices of an adapter are padded with zeros to the same rank.
    b: [max_loras, out, rank]. scales: fp32 [max_loras, layers]. starts: int32 [layers + 1], see _expand_kernel.
    """

    def __init__(self, linears: Sequence[nn.Linear], like: Tensor) -> None:
        """like: has the dtype and the device of the matrices. At least one of the layers has a hook of adapters."""
        layers = [hook_of(linear) for linear in linears]
        self._mapping = mapping = next(layer.mapping for layer in layers if layer is not None)
        self._sizes, num_in = [shape_of(linear)[0] for linear in linears], shape_of(linears[0])[1]
        self._rank = max(triton.next_power_of_2(mapping.max_rank), ROWS)
        self.a = like.new_zeros(mapping.max_loras, len(layers) * self._rank, num_in)
        self.b = like.new_zeros(mapping.max_loras, sum(self._sizes), self._rank)
        self.scales = like.new_zeros(mapping.max_loras, len(layers), dtype=torch.float32)
        self.starts = self._starts_on(like.device)
        self._layers = [self] if len(layers) == 1 else [self._of_layer(index) for index in range(len(layers))]
        for index, layer in enumerate(layers):
            if layer is not None:
                layer.kernels[self], layer.add = index, self._layers[index]

    def put(self, adapter_index: int, layer_index: int, update: LowRankUpdate | None) -> None:
        """Write an update of the layer with this index over the previous one. None: the adapter does not change the layer."""
        layer = self._layers[layer_index]
        a, b = layer.a[adapter_index].zero_(), layer.b[adapter_index].zero_()
        if update is not None:
            a[: len(update.a)], b[:, : len(update.a)] = update.a, update.b
            layer.scales[adapter_index].fill_(update.scale)

    def __call__(self, x: Float[Tensor, "*rows in"], out: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows out"]:
        """Add the adapters of the rows to the outputs, in place if their rows are contiguous.

        Raises: UnsupportedError if these are not all rows of the run.
        """
        if self.is_off:
            return out
        indices: Tensor = self._mapping.kernels.indices
        shape, (x, out) = out.shape, (tensor.flatten(0, -2) for tensor in (x, out))
        check_rows(x, len(indices))
        x, out = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x, out))
        (num_rows, num_in), (_, num_ranks, _) = x.shape, self.a.shape
        has_tensor_cores = uses_tensor_cores() and x.element_size() == 2
        tile, ranks, columns = _SIZES if has_tensor_cores else _SIZES_WITHOUT_TENSOR_CORES
        num_parts, ranks = triton.cdiv(num_in, _PART), min(self._rank, ranks)
        products, tiles = x.new_empty(num_parts, num_rows, num_ranks, dtype=torch.float32), triton.cdiv(num_rows, ROWS)
        _shrink_kernel[(tiles, num_ranks // ranks, num_parts)](
            x, indices, self.a, products, x.stride(0), self.a.stride(0), num_rows, num_in, num_ranks, ROWS, ranks, _PART, tile,
            num_warps=2,
        )  # fmt: skip
        _expand_kernel[(tiles, triton.cdiv(max(self._sizes), columns), len(self._sizes))](
            products, indices, self.b, self.scales, self.starts, out, self.b.stride(0), self.scales.stride(0), out.stride(0),
            num_rows, num_ranks, self._rank, ROWS, ranks, columns, num_parts, num_warps=2,
        )  # fmt: skip
        return out.view(shape)

    @property
    def is_off(self) -> bool:
        """Whether no row of the run has an adapter."""
        return cast(RowIndices, self._mapping.kernels).is_off

    def _of_layer(self, index: int) -> "LowRankUpdates":
        """Return the updates of a single layer, in the same memory."""
        part, start = copy.copy(self), sum(self._sizes[:index])
        part._sizes = self._sizes[index : index + 1]
        part.a = self.a[:, index * self._rank :][:, : self._rank]
        part.b = self.b[:, start:][:, : self._sizes[index]]
        part.scales, part.starts = self.scales[:, index : index + 1], part._starts_on(self.a.device)
        return part

    def _starts_on(self, device: torch.device) -> Tensor:
        return torch.tensor([0, *accumulate(self._sizes)], dtype=torch.int32).to(device)


class AdaptedProduct(nn.Module):
    """A product of linear layers, and the adapters of these layers, with the norm before both and the gate after them.

    Args:
        product: computes all of it but the adapters.
        plain: computes the layers alone, without their hooks.
        norm: of x. None: there is none.
        activation: of the gate, as FewRowsLinear's. None: there is no gate.
    """

    def __init__(
        self,
        product: nn.Module,
        plain: nn.Module,
        linears: Sequence[nn.Linear],
        norm: nn.Module | None = None,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        self.product, self.plain, self.norm, self.activation = product, plain, norm, activation
        self.updates = LowRankUpdates(linears, linears[0].weight)

    def forward(self, x: Float[Tensor, "*rows in"], **options: Tensor) -> Float[Tensor, "*rows out"]:
        if self.updates.is_off:
            return cast(Tensor, self.product(x, **options))
        x = x if self.norm is None else self.norm(x)
        out = self.updates(x, self.plain(x, **options))
        return out if self.activation is None else gate_and_mul(out, self.activation)


def hook_of(linear: nn.Module) -> AdaptedLinear | None:
    """Return the adapters of a layer. None: requests cannot adapt it."""
    return next((hook for hook in linear._forward_hooks.values() if isinstance(hook, AdaptedLinear)), None)


def copy_without_hooks(module: M) -> M:
    """Return a module with the same parameters and submodules, and no hooks."""
    other = copy.copy(module)
    other._modules, other._forward_hooks = dict(module._modules), OrderedDict()
    return other


def use_kernels(model: nn.Module, max_num_rows: int, *, can_be_off: bool = True) -> RowIndices:
    """Let kernels add all adapters of a compiled model. Returns the indices that they read.

    Args:
        max_num_rows: the most rows of a step.
        can_be_off: as in RowIndices.
    """
    weight = next(model.parameters())
    rows = RowIndices(max_num_rows, weight.device, can_be_off=can_be_off)
    for module in model.modules():
        if (layer := hook_of(module)) is not None:
            layer.mapping.kernels = rows
            if layer.add is None:  # the module computes its hook
                LowRankUpdates([cast(nn.Linear, module)], weight)
    model.register_forward_pre_hook(rows.begin)
    return rows
