"""All layers of a model as one program on a CPU: a decode step is one call, and its threads meet only between the kernels.

In: the blocks of cpu_blocks.py whose linear layers this package's kernels compute. Out: a module in place of their list. In a
step with prompts, the attention is a call of its own, and the steps before and behind it are two short programs. The kernels
are the same in both, and so are the bits of a row.

One stream of GPT-2's shape spent a third of a step between the kernels: on Python, on torch's small operators, and on threads
that wait for each other (bfloat16, 2 cores).
"""

import logging
import math
import struct
from enum import IntEnum, auto
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.cpu import CPUStep
from nanoinfer.attention.cpu_kernel import DecodeKernel
from nanoinfer.devices import native
from nanoinfer.devices.program import Program, Step
from nanoinfer.errors import UnsupportedError
from nanoinfer.models.cpu_linear import CompiledLinear
from nanoinfer.models.layers import RMSNorm

logger = logging.getLogger(__name__)


class Array(IntEnum):
    """The arrays of a batch. All but the last one have a row for each token."""

    X = 0  # from layer to layer
    NORMED = auto()
    QKV = auto()
    ATTENDED = auto()
    HIDDEN = auto()  # of the MLP
    COS = auto()
    SIN = auto()
    SCRATCH = auto()
    ROWS = auto()  # KernelRows.array


class LayerSteps:
    """Collects the steps of one layer, in their order. A block of cpu_blocks.py describes itself to it.

    Attributes:
        parts: the steps before the attention, and those behind it.
        attention: layer, num_heads, num_kv_heads, head_dim.
        widths: numbers of a token in each array that is written.
        scratch_bytes: of a token.

    Raises:
        UnsupportedError: a part that the kernels do not compute.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._library = native.load(Path(__file__).with_name("layers.cpp"), *native.definitions_of(dtype))
        self.parts: list[list[Step]] = [[]]
        self.attention = (0, 0, 0, 0)
        self.widths: dict[Array, int] = {}
        self.scratch_bytes = 0

    def norm(self, norm: nn.LayerNorm | RMSNorm, x: Array, out: Array) -> None:
        is_rms_norm = isinstance(norm, RMSNorm)
        if norm.weight is None or norm.weight.ndim != 1 or not (is_rms_norm or norm.bias is not None):
            raise UnsupportedError("a norm without a weight or a bias, or over several axes, is no step of a program")
        function = self._library.rms_norm if is_rms_norm else self._library.layer_norm
        bias = 0 if isinstance(norm, RMSNorm) else norm.bias.data_ptr()
        self._add(Step(function, (x, out, norm.weight.data_ptr(), bias, len(norm.weight), _bits(norm.eps))))
        self.widths[out] = len(norm.weight)

    def linear(self, linear: nn.Module, x: Array, out: Array, *, factor: int = -1) -> None:
        """A linear layer. factor: an array that multiplies its outputs. A residual is what `out` holds before.

        The kernels' rows are independent for any number of rows, so a form's limit of the rows that were compared is not kept.
        """
        if not isinstance(linear, CompiledLinear) or (linear.form.least, linear.form.multiple) != (1, 1):
            name, form = type(linear).__name__, getattr(linear, "form", None)
            raise UnsupportedError(f"a {name} is no step of a program" + (f" ({form.name})" if form else ""))
        residual = out if linear.adds_residual else -1
        self._add(linear.step(x=x, out=out, scratch=Array.SCRATCH, factor=factor, residual=residual))
        self.widths[out] = linear.num_out
        self.scratch_bytes = max(self.scratch_bytes, linear.scratch_bytes)

    def rotate(self, norm: RMSNorm | None, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Rotate the queries and keys in QKV. norm: over heads, with a weight for each."""
        weights = (norm.weight[0].data_ptr(), norm.weight[num_heads].data_ptr()) if norm else (0, 0)
        sizes = (num_heads, num_kv_heads, head_dim, _bits(norm.eps if norm else 0.0))
        self._add(Step(self._library.rotate, (Array.QKV, Array.COS, Array.SIN, *weights, *sizes)))

    def attend(self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """From QKV to ATTENDED."""
        self.attention = (layer, num_heads, num_kv_heads, head_dim)
        self.widths[Array.ATTENDED] = num_heads * head_dim
        self.parts.append([])

    def _add(self, step: Step) -> None:
        self.parts[-1].append(step)


class CompiledLayers(nn.Module):
    """The layers of a model, called like one of them.

    Raises:
        UnsupportedError: a block that cannot be steps of a program, or there is no C++ compiler.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks
        self._layers = [_steps_of(block) for block in blocks]
        self._dtype = next(blocks.parameters()).dtype
        self._parts = [(Program(before), Program(behind)) for before, behind in (layer.parts for layer in self._layers)]
        widths = {array: max(layer.widths[array] for layer in self._layers) for array in self._layers[0].widths}
        self._narrow = max(widths[Array.NORMED], widths[Array.ATTENDED])
        self._wide = max(widths[Array.QKV], widths[Array.HIDDEN])
        self._scratch_bytes = max(layer.scratch_bytes for layer in self._layers)
        self._decode: tuple[DecodeKernel, Program] | None = None  # the program of the kernel that decoded last

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden"],
        *others: Any,  # cos and sin for a model with rotary positions, and the attention
    ) -> Float[Tensor, "num_tokens hidden"]:
        *rotary, attend = others
        if x.dtype != self._dtype:
            raise UnsupportedError(f"the layers' weights are in {self._dtype}, got rows in {x.dtype}")
        num_tokens, out = len(x), x.clone(memory_format=torch.contiguous_format)
        normed, qkv = x.new_empty(num_tokens, self._narrow), x.new_empty(num_tokens, self._wide)
        scratch = torch.empty(num_tokens, self._scratch_bytes, dtype=torch.uint8)
        # attended and hidden take the memory of normed and qkv, which have been read by then
        arrays = [out, normed, qkv, normed, qkv, *([part.contiguous() for part in rotary] or (None, None)), scratch, None]
        kernel = attend.decode_kernel if isinstance(attend, CPUStep) else None
        if kernel is not None:
            rows = attend.decode_rows(kernel)
            arrays[Array.ROWS] = rows.array
            self._decode_program(kernel)(num_tokens, arrays)
            return out
        for layer, (before, behind) in zip(self._layers, self._parts, strict=True):
            before(num_tokens, arrays)
            index, num_heads, num_kv_heads, head_dim = layer.attention
            shape = num_tokens, num_heads + 2 * num_kv_heads, head_dim
            heads = qkv.flatten()[: math.prod(shape)].view(shape)
            q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            arrays[Array.ATTENDED] = attend(index, q, k, v).contiguous()
            arrays[Array.QKV] = arrays[Array.HIDDEN] = qkv = torch.empty_like(qkv)  # `attend` may have kept q, k and v
            behind(num_tokens, arrays)
        return out

    def _decode_program(self, kernel: DecodeKernel) -> Program:
        """All layers, their attention included."""
        if self._decode is None or self._decode[0] is not kernel:
            steps = []
            for layer in self._layers:
                attention = kernel.step(Array.QKV, Array.ATTENDED, Array.ROWS, layer=layer.attention[0])
                steps += [*layer.parts[0], attention, *layer.parts[1]]
            self._decode = kernel, Program(steps)
        return self._decode[1]


class CompiledNorm(nn.Module):
    """A norm outside the layers.

    Raises:
        UnsupportedError: as LayerSteps.norm.
    """

    def __init__(self, norm: nn.LayerNorm | RMSNorm) -> None:
        super().__init__()
        self.norm = norm
        steps = LayerSteps(norm.weight.dtype if norm.weight is not None else torch.float32)
        steps.norm(norm, Array.X, Array.NORMED)
        self._program = Program(steps.parts[0])

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        weight = self.norm.weight
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
            return self.norm(x)  # with torch's own error
        x = x.contiguous()
        out = torch.empty_like(x)
        self._program(x.numel() // len(weight), (x, out))
        return out


def _steps_of(block: Any) -> LayerSteps:
    steps = LayerSteps(next(block.parameters()).dtype)
    block.describe(steps)
    return steps


def compile_layers(model: nn.Module) -> None:
    """Replace a model's list of blocks by a list of one CompiledLayers, and the norms beside it, where kernels compute them.

    A block describes itself in the class that has its `forward`, because a subclass may compute something else. So may a model
    with a `forward` of its own: it may stop at some layer, or read what is between two.
    """
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    if not owner.__module__.startswith("nanoinfer.models."):
        return
    for name, part in list(model.named_children()):
        try:
            if isinstance(part, nn.ModuleList) and len(part) and all("describe" in vars(type(block)) for block in part):
                setattr(model, name, nn.ModuleList([CompiledLayers(part)]))
            elif isinstance(part, nn.LayerNorm | RMSNorm) and type(part) in (nn.LayerNorm, RMSNorm):
                setattr(model, name, CompiledNorm(part))
        except UnsupportedError as error:
            logger.debug("%s is no program: %s", name, error)


def _bits(number: float) -> int:
    """A double as the integer of the same bits."""
    return int(struct.unpack("q", struct.pack("d", number))[0])
