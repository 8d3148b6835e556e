"""Linear layers whose rows have the same bits in any number of rows, for LLM(batch_invariant=True) on a GPU.

In: any number of rows. Out: a linear layer's rows, as linear_kernel.py has them. cuBLAS chooses another order of additions for
other numbers of rows, and a product of few rows by another instruction has yet other bits. Here each output is the same chain
of additions whatever the number of rows: the tensor cores' products of 16 inputs at a time (mma.sync), in the order of the
inputs, in parts if linear_kernel.py splits the layer, whose sums are added in order. So few rows take linear_kernel.py's
kernel, and more rows the one of this file, whose tiles have more rows and columns.

Warp-group products (wgmma, tcgen05) add in another order. Triton takes them for tiles of 64 rows or more, hence ROWS. Without
tensor cores, which are for 16 bits, a single tile size serves all numbers of rows, and each output is a chain of fused
multiply-adds. fast/batch_independence.py checks all of this on the machine, at load.
"""

from dataclasses import replace
from types import MethodType

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.triton import TritonBackend, architecture
from nanoinfer.config import EngineConfig
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.batch_independence import is_batch_independent
from nanoinfer.fast.cuda import linear_kernel
from nanoinfer.fast.cuda.linear_kernel import Arrivals, _store_outputs, few_rows_linear, num_splits_of

NUM_SPLITS = 8  # of a query's keys. A power of 2, the same for every query, because the splits are merged in a fixed order
ROWS, COLUMNS, TILE, NUM_WARPS, NUM_STAGES = 32, 64, 64, 4, 3  # with tensor cores
PLAIN_ROWS, PLAIN_COLUMNS, PLAIN_TILE = 16, 32, 16  # without, for any number of rows


@triton.jit(do_not_specialize=["num_rows"])
def _invariant_linear_kernel(
    x, weight, bias, residual, out, x_stride, num_rows, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of ROWS rows. The parts of PART inputs are those of _linear_kernel, and so is their order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = rows < num_rows, columns < NUM_OUT
    starts = weight + columns[:, None].to(tl.int64) * NUM_IN
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for split in range(NUM_SPLITS):
        part = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(split * PART, tl.minimum((split + 1) * PART, NUM_IN), TILE):
            inputs = first + tl.arange(0, TILE)
            within = inputs < NUM_IN
            tile = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=there[:, None] & within[None, :], other=0.0)
            mask = inside[:, None] & within[None, :]
            w = tl.load(starts + inputs[None, :], mask=mask, other=0.0)
            part = tl.dot(tile, tl.trans(w), part, input_precision="ieee")
            if GATED:
                w = tl.load(starts + NUM_OUT * NUM_IN + inputs[None, :], mask=mask, other=0.0)
                up = tl.dot(tile, tl.trans(w), up, input_precision="ieee")
        total += part
    _store_outputs(total, up, bias, residual, out, rows, columns, num_rows, NUM_OUT, GATED, ACTIVATION)


def invariant_linear(
    x: Float[Tensor, "*rows in"],
    weight: Float[Tensor, "all_out in"],
    bias: Float[Tensor, " all_out"] | None,
    *,
    residual: Float[Tensor, "num_tokens out"] | None = None,
    gated: bool = False,
    activation: str = "silu",
    in_place: bool = False,
    arrivals: Arrivals | None = None,
) -> Float[Tensor, "*rows out"]:
    """Compute a linear layer, as few_rows_linear does, for any number of rows in its dtype, of 16 or 32 bits.

    Args:
        arrivals: the layer's counters. None: the inputs are not split, for any number of rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_out, num_in = len(weight) // (1 + gated), weight.shape[1]
    has_tensor_cores = x.element_size() == 2 and (architecture() or 0) >= 80
    if has_tensor_cores and len(rows) <= linear_kernel.MAX_ROWS:
        few = few_rows_linear(
            rows, weight, bias, residual=residual, gated=gated, activation=activation, in_place=in_place, arrivals=arrivals
        )
        return few.view(*x.shape[:-1], num_out)
    sizes, num_stages, num_splits = (PLAIN_ROWS, PLAIN_COLUMNS, PLAIN_TILE), 1, 1
    if has_tensor_cores:
        sizes, num_stages = (ROWS, COLUMNS, TILE), NUM_STAGES
        num_splits = 1 if arrivals is None else num_splits_of(num_out, num_in)
    part = triton.cdiv(triton.cdiv(num_in, num_splits), linear_kernel.TILE) * linear_kernel.TILE
    out = x.new_empty(len(rows), num_out) if residual is None or not in_place else residual
    _invariant_linear_kernel[(triton.cdiv(len(rows), sizes[0]), triton.cdiv(num_out, sizes[1]))](
        rows, weight, bias, residual, out, rows.stride(0), len(rows), num_in, num_out, gated, activation, *sizes,
        num_splits, part, num_warps=NUM_WARPS, num_stages=num_stages,
    )  # fmt: skip
    return out.view(*x.shape[:-1], num_out)


def make_linears_invariant(model: nn.Module) -> None:
    """Let every nn.Linear of a model compute by invariant_linear, wherever the model calls it: in its graph, or as its head."""
    for module in model.modules():
        if type(module) is nn.Linear:
            setattr(module, "forward", MethodType(_forward, module))  # noqa: B010  the method of this layer alone


def _forward(linear: nn.Linear, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
    return invariant_linear(x, linear.weight.contiguous(), linear.bias)


def checked(runtime: Runtime, config: EngineConfig) -> Runtime:
    """Return a compiled runtime whose attention splits all keys alike, with the result of the check on this GPU.

    Another backend than Triton's, whose splits are not known, is not checked and remains without the promise.
    """
    if type(runtime.backend) is not TritonBackend:
        return runtime
    backend = TritonBackend()
    backend.num_splits = NUM_SPLITS
    # The parts of the answers of a prompt's queries, which are decodes.
    num_parts = config.scheduler.max_num_batched_tokens * runtime.model.config.num_attention_heads * NUM_SPLITS
    part_bytes = num_parts * (runtime.sizes.head_dim + 2) * torch.float32.itemsize
    runtime = replace(runtime, backend=backend, kept_step_bytes=runtime.kept_step_bytes + part_bytes)
    return replace(runtime, is_batch_independent=is_batch_independent(runtime, has_single_queries=True))
