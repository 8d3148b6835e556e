"""Linear layers on a CPU in 8 and 4 bits, computed by quantized_linear.cpp.

In: a FusedLinear. Out: PackedQuantizedLinear, which makes the kernel calls of programs. loading/quantization.py rounds.

With one row, a layer takes the time of reading its weights, so half or a quarter of the bytes take that much less. With many
rows it takes the time of the products, so activations are rounded to 8 bits too: for each row and group, x = scale * integer in
-127 .. 127. Processors have instructions for sums of such products that do more per cycle than those for bfloat16.

The sum of a group's products is an integer, which is exact in any order. So a row has the same bits in any batch.
Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339 (activations rounded as they come).
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.linear import ACTIVATION_CODES, adapters_of, write_outputs
from nanoinfer.fast.cpu.program import NOTHING, KernelCall, Slice, fields, tile_definitions
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.loading.quantization import quantize, quantized, stored_integers
from nanoinfer.loading.weights import QuantizedWeight

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
    """A linear layer in the layout of quantized_linear.cpp: see PackedLinear. The rows have the dtype of the plain weights.

    Raises:
        UnsupportedError: the kernel does not support the dtype, or cannot be compiled.
    """

    def __init__(
        self,
        fused: FusedLinear,
        bits: int,
        adapters: "AdaptedLayers | None" = None,
        kept: Sequence[UInt8[Tensor, " bytes"]] = (),
    ) -> None:
        source = Path(__file__).with_name("quantized_linear.cpp")
        self.num_in, self.num_out, self.dtype = fused.in_features, fused.out_features, fused.linears[0].weight.dtype
        tiles = tile_definitions(torch.bfloat16, self.num_in)  # the products are those of integers, in any dtype
        definitions = native.streamed(), *native.definitions_of(self.dtype), *tiles
        self._kernel = native.load(source, *definitions, structures=(QuantizedLinearCall,)).linear
        weights, bias = [linear.weight for linear in fused.linears], fused.merged_bias()
        self.is_exact = all(stored_integers(weight, bits) for weight in weights)
        start, num_tiles = 0, -(-self.num_out // TILE)  # the last tile is padded with zeros
        self._arrays: tuple[Tensor, ...] = ()
        if kept:
            dtypes = torch.int32, torch.float32, torch.uint8
            self._arrays = tuple(x.view(dtype).view(num_tiles, -1, TILE) for x, dtype in zip(kept, dtypes, strict=True))
        for piece in () if kept else quantized(weights, bits):
            columns = _columns(piece)
            self._arrays = self._arrays or tuple(x.new_zeros(num_tiles, x.shape[1], TILE) for x in columns)
            self._write(columns, start)
            start += len(piece.scales)
        num_groups = self._arrays[1].shape[1]
        self.scratch_bytes = self.num_in + 8 * num_groups  # integers, and a scale and a sum per group
        self._bias = None if bias is None else bias.detach()
        self._sizes = self.num_out, self.num_in, self.num_in // num_groups, bits, ACTIVATION_CODES[fused.activation]
        self._adapters = adapters_of(fused, self.dtype, adapters)

    def write(self, name: str, values: Float[Tensor, "*shape"], start: int) -> None:
        """Replace the weight, which is rounded, or the bias of the outputs from `start` on: see PackedLinear.write."""
        if name == "bias":
            assert self._bias is not None
            self._bias[start : start + len(values)] = values
        else:
            _, _, group_size, bits, _ = self._sizes
            self._write(_columns(quantize(values, bits, group_size)), start)

    def _write(self, columns: Sequence[Tensor], start: int) -> None:
        for tiles, values in zip(self._arrays, columns, strict=True):
            write_outputs(tiles, values, start)

    def rows(self, outputs: Int[Tensor, " n"]) -> Float[Tensor, "n in"]:
        """Return the weights of some outputs."""
        words, scales, zeros = (tiles[outputs // TILE, :, outputs % TILE] for tiles in self._arrays)
        integers, bits = words.view(torch.uint8), self._sizes[3]
        if bits == 4:
            groups = integers.unflatten(1, (-1, 1, 4))
            integers = torch.cat((groups & 15, groups >> 4), dim=2).flatten(1)
        found: Tensor = QuantizedWeight(bits, integers, scales, zeros).widened().to(self.dtype)
        return found

    def arrays(self) -> list[Tensor]:
        """Return the tensors that hold the weights: integers, scales and zeros."""
        return [*self._arrays]

    def call(self, *, x: Slice, out: Slice, scratch: int, factor: Slice = NOTHING, residual: Slice = NOTHING) -> KernelCall:
        """See PackedLinear.call."""
        pointers = (array.data_ptr() for array in self._arrays)
        bias = None if self._bias is None else self._bias.data_ptr()
        adapted = self._adapters and self._adapters.address
        return KernelCall(
            self._kernel, QuantizedLinearCall(x, factor, residual, out, scratch, *pointers, bias, *self._sizes, adapted)
        )


def _columns(weight: QuantizedWeight) -> tuple[Int32[Tensor, "out words"], Tensor, Tensor]:
    """Return the integers, four inputs in a word, the scales and the zeros.

    In 4 bits, the upper halves of a word's bytes are the next four inputs.
    """
    words = weight.integers.unflatten(1, (-1, 4))
    if weight.bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    return words.flatten(1).contiguous().view(torch.int32), weight.scales, weight.zeros
