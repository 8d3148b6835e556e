"""Linear layers on a CPU in 8 and 4 bits, computed by quantized_linear.cpp.

In: a FusedLinear. Out: PackedQuantizedLinear, which makes the kernel calls of programs. loading/quantization.py rounds.

With one row, a layer takes the time of reading its weights, so half or a quarter of the bytes take that much less. With many
rows it takes the time of the products, so activations are rounded to 8 bits too: for each row and group, x = scale * integer in
-127 .. 127. Processors have instructions for sums of such products that do more per cycle than those for bfloat16.

The sum of a group's products is an integer, which is exact in any order. So a row has the same bits in any batch.
Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339 (activations rounded as they come).
"""

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Shaped, UInt8
from torch import Tensor

from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.linear import ACTIVATION_CODES, adapters_of
from nanoinfer.fast.cpu.program import NOTHING, KernelCall, Slice, fields, tile_definitions
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.loading.quantization import QuantizedWeight, quantized

if TYPE_CHECKING:
    from nanoinfer.lora.layers import AdaptedLayers

TILE = 32  # the number of outputs that quantized_linear.cpp computes together


class QuantizedLinearCall(ctypes.Structure):
    """The arguments of quantized_linear.cpp."""

    _fields_ = fields(
        (Slice, "x factor residual out"),
        (c_int64, "scratch"),
        (c_void_p, "weight scales zeros bias"),
        (c_int64, "num_out num_in group_size bits activation"),
        (c_void_p, "adapted"),
    )


class PackedQuantizedLinear:
    """A linear layer in the layout of quantized_linear.cpp: see PackedLinear. The rows are in bfloat16.

    Raises:
        UnsupportedError: the kernel cannot be compiled.
    """

    def __init__(self, fused: FusedLinear, bits: int, adapters: "AdaptedLayers | None" = None) -> None:
        source = Path(__file__).with_name("quantized_linear.cpp")
        definitions = "BF16", *tile_definitions(torch.bfloat16, fused.in_features)
        self._kernel = native.load(source, *definitions, structures=(QuantizedLinearCall,)).linear
        weight, bias = quantized([linear.weight for linear in fused.linears], bits), fused.merged_bias()
        self.num_in, self.num_out, self.dtype = fused.in_features, fused.out_features, torch.bfloat16
        self.scratch_bytes = self.num_in + 8 * (self.num_in // weight.group_size)  # integers, and a scale and a sum per group
        self._arrays = _tiled_integers(weight), _tiled(weight.scales), _tiled(weight.zeros)
        self._bias = None if bias is None else bias.detach().to(torch.bfloat16)
        self._sizes = self.num_out, self.num_in, weight.group_size, bits, ACTIVATION_CODES[fused.activation]
        self._adapters = adapters_of(fused, self.dtype, adapters)

    def call(self, *, x: Slice, out: Slice, scratch: int, factor: Slice = NOTHING, residual: Slice = NOTHING) -> KernelCall:
        """See PackedLinear.call."""
        pointers = (array.data_ptr() for array in self._arrays)
        bias = None if self._bias is None else self._bias.data_ptr()
        adapted = self._adapters and self._adapters.address
        return KernelCall(
            self._kernel, QuantizedLinearCall(x, factor, residual, out, scratch, *pointers, bias, *self._sizes, adapted)
        )


def _tiled(array: Shaped[Tensor, "out columns *rest"]) -> Shaped[Tensor, "tiles columns tile *rest"]:
    """Lay out the columns of TILE outputs, one column after the other. The last tile is padded with zeros."""
    tiles: Tensor = F.pad(array, (*[0, 0] * (array.ndim - 1), 0, -len(array) % TILE)).unflatten(0, (-1, TILE))
    return tiles.transpose(1, 2).contiguous()


def _tiled_integers(weight: QuantizedWeight) -> UInt8[Tensor, "tiles words tile 4"]:
    """Lay out the integers of four inputs together. In 4 bits, the upper halves of the bytes are the next four."""
    words = weight.integers.unflatten(1, (-1, 4))
    if weight.bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    return _tiled(words)
