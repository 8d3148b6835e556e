"""Linear layers on a CPU whose weights are kept in 8 or 4 bits.

In: an nn.Linear. Out: a CPULinear that computes nearly the same. cpu_linear.py has the layers that lose nothing.

A group of inputs of an output channel has a scale and a zero: weight = scale * (integer - zero). At one row a layer takes the
time of reading its weights, so half or a quarter of the bytes take that much less. At many rows it takes the time of the
products, so the activations are rounded to 8 bits too: for each row and group, x = scale * integer in -127 .. 127. Processors
have instructions for sums of such products that do more per cycle than those for bfloat16. quantized_linear.cpp uses them.

The sum of a group's products is an integer, which is exact in any order. So a row has the same bits among any number of rows.
Sources: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339 (8 bits for weights and activations). Yao et al. 2022,
https://arxiv.org/abs/2206.01861 (a scale per group, activations rounded as they come).
"""

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor, nn

from nanoinfer.devices import native
from nanoinfer.errors import UnsupportedError
from nanoinfer.models.cpu_linear import Activation, CompiledLinear, CPULinear
from nanoinfer.models.weights import QuantizedParameter, QuantizedWeight

logger = logging.getLogger(__name__)

BITS = {"int8": 8, "int4": 4}  # quantization -> bits
# bits -> how many inputs share a scale. The first number that divides a layer's inputs is used.
GROUPS = {8: (128, 64, 32), 4: (64, 32)}
MULTIPLE = 32  # of inputs, the smallest group
TILE = 32  # outputs that quantized_linear.cpp computes together


def quantized(linear: nn.Linear, bits: int) -> QuantizedWeight:
    """Return a layer's weight in integers: those of the checkpoint, which lose nothing, or rounded ones."""
    weight = linear.weight
    stored = weight.read_integers() if isinstance(weight, QuantizedParameter) else None
    if stored is None or stored.bits > bits:
        return quantize(weight, bits)
    # Fewer inputs to a group than in the file, where activations would lose more in a larger one.
    group = math.gcd(stored.group, _group_size(stored.integers.shape[1], bits))
    scales, zeros = (array.repeat_interleave(stored.group // group, dim=1) for array in (stored.scales, stored.zeros))
    return QuantizedWeight(bits, stored.integers, scales, zeros)


def quantize(weight: Float[Tensor, "out in"], bits: int) -> QuantizedWeight:
    """Round a weight. In 8 bits the zero is 128. In 4 bits the 16 values span the range of a group.

    Args:
        weight: the number of inputs must be a multiple of MULTIPLE.
        bits: 8 or 4.
    """
    group = _group_size(weight.shape[1], bits)
    form = _in_eight_bits if bits == 8 else _in_four_bits
    rows = max(2**20 // weight.shape[1], 1)  # at a time, so that what is computed stays in the processor's cache
    parts = [form(part.unflatten(1, (-1, group)).float()) for part in weight.detach().split(rows)]
    integers, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedWeight(bits, integers, scales, zeros)


def _group_size(num_inputs: int, bits: int) -> int:
    return next(group for group in GROUPS[bits] if num_inputs % group == 0)


def _in_eight_bits(groups: Float[Tensor, "out groups group"]) -> tuple[Tensor, Tensor, Tensor]:
    scales = (groups.abs().amax(2) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # a group of zeros has any scale
    integers = (groups / scales.unsqueeze(2)).round() + 128
    return integers.to(torch.uint8).flatten(1), scales, torch.full_like(scales, 128, dtype=torch.uint8)


def _in_four_bits(groups: Float[Tensor, "out groups group"]) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)  # 0 has an integer of its own
    scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / scales).round().unsqueeze(2)
    integers = ((groups / scales.unsqueeze(2)).round() + zeros).clamp(0, 15)
    shifted = integers - zeros
    fitted = (groups * shifted).sum(2) / shifted.square().sum(2)  # the scale with the least squared error for these integers
    scales = torch.where(fitted > 0, fitted, scales)
    return integers.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8).squeeze(2)


class QuantizedLinear(CompiledLinear):
    """The weight laid out for quantized_linear.cpp. x is in bfloat16."""

    def __init__(
        self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False, bits: int
    ) -> None:
        super().__init__(linear, activation, adds_residual=adds_residual)
        weight = quantized(linear, bits)
        self._weight = _tiled_integers(weight)
        self._scales, self._zeros = _tiled(weight.scales), _tiled(weight.zeros)
        self._bias = None if self._bias is None else self._bias.float()
        sizes = (linear.out_features, linear.in_features, weight.group, bits)
        scratch_bytes = linear.in_features + 8 * (linear.in_features // weight.group)  # integers, and a scale and sum per group
        self.set_kernel(_kernel(), (self._weight, self._scales, self._zeros, self._bias), sizes, scratch_bytes)

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise UnsupportedError(f"a quantised linear layer computes in bfloat16, got {x.dtype}; load the model in bfloat16")
        return self.call_kernel(x, residual)


class WidenedLinear(CPULinear):
    """The same weight, widened at each call: for a machine without a C++ compiler. It saves memory only."""

    def __init__(
        self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False, bits: int
    ) -> None:
        super().__init__(linear, activation, adds_residual=adds_residual)
        self._weight = quantized(linear, bits)

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = F.linear(x, self._weight.widened().to(x.dtype), self._bias)
        return self.activated(out if residual is None else residual + out)


def quantized_classes(quantization: str) -> dict[str, Callable[..., CPULinear]]:
    """The class that a layer becomes, by its name in verdicts. quantization: a key of BITS."""
    bits = BITS[quantization]
    if _kernel() is None:
        return {f"widened from {bits} bits": partial(WidenedLinear, bits=bits)}
    return {f"in {bits} bits": partial(QuantizedLinear, bits=bits)}


@cache
def _kernel() -> Any:
    """The function of quantized_linear.cpp, or None if this machine cannot compile it."""
    try:
        return native.load(Path(__file__).with_name("quantized_linear.cpp")).linear
    except UnsupportedError as error:
        logger.warning("quantised layers are widened at each call, which saves memory and is slow: %s", error)
        return None


def _tiled(array: Shaped[Tensor, "out columns"]) -> Shaped[Tensor, "tiles columns tile"]:
    """The columns of TILE outputs, one column after the other. The last tile is filled up with zeros."""
    padded = F.pad(array, (0, 0, 0, -len(array) % TILE))
    return padded.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _tiled_integers(weight: QuantizedWeight) -> UInt8[Tensor, "tiles words tile 4"]:
    """The integers of four inputs side by side. In 4 bits, the upper halves of the bytes are the next four."""
    integers = F.pad(weight.integers, (0, 0, 0, -len(weight.integers) % TILE))
    words = integers.unflatten(1, (-1, 4))
    if weight.bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    return words.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()
