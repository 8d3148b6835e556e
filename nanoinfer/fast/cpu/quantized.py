"""Linear layers on a CPU in 8 and 4 bits, computed by quantized_linear.cpp.

In: a FusedLinear. Out: PackedQuantizedLinear, which makes the kernel calls of programs. features/quantization rounds.

With one row, a layer takes the time of reading its weights, so half or a quarter of the bytes take that much less. With many
rows it takes the time of the products, so activations are rounded to 8 bits too: for each row and group, x = scale * integer in
-127 .. 127. Processors have instructions for sums of such products that do more per cycle than those for bfloat16.

The sum of a group's products is an integer, which is exact in any order. So a row has the same bits in any batch.
Weights in 4 bits are rounded by moments: how large each input is (calibration.py). Of the ranges that rounding.cpp tries for
a group, it takes that with the least sum of squared errors times moments. Its sums have an order of their own, so equal moments
give equal integers on any processor, rank and number of threads.

Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339 (activations rounded as they come). The importance matrix of
llama.cpp, https://github.com/ggml-org/llama.cpp/pull/4861 (weights by moments).
"""

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_int64
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.linear import LinearCall, PackedLinear, write_outputs
from nanoinfer.fast.cpu.program import KernelCall, Program, fields, tile_definitions
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.quantization.rounding import Moments, QuantizedWeight, quantize, quantized, stored_integers
from nanoinfer.features.training.stored import StoredParameter

TILE = 32  # the number of outputs that quantized_linear.cpp computes together


class RoundingCall(ctypes.Structure):
    _fields_ = fields((c_int64, "num_groups group_size"))


def rounded(groups: Float[Tensor, "out groups group"], moments: Float[Tensor, " in"]) -> tuple[Tensor, Tensor, Tensor]:
    """Round weights to 4 bits by moments. An input without a moment counts as much as the mean."""
    is_known = moments.isfinite() & (moments > 0)
    known = moments[is_known].tolist()
    counts = torch.where(is_known, moments / (math.fsum(known) / len(known) if known else 1.0), 1.0)
    num_out, num_groups, group_size = groups.shape
    integers, zeros = (torch.empty(num_out, size, dtype=torch.uint8) for size in (num_groups * group_size, num_groups))
    scales = torch.empty(num_out, num_groups)
    library = native.load(Path(__file__).with_name("rounding.cpp"), structures=(RoundingCall,))
    rounding = Program([KernelCall(library.round_weights, RoundingCall(num_groups, group_size))])
    rounding(num_out, (groups.contiguous(), counts, integers, scales, zeros))
    return integers, scales, zeros


class PackedQuantizedLinear(PackedLinear):
    """A linear layer in the layout of quantized_linear.cpp. The rows have the dtype of the plain weights."""

    def __init__(
        self, fused: FusedLinear, bits: int, kept: Sequence[UInt8[Tensor, " bytes"]] = (), moments: Moments | None = None
    ) -> None:
        self._bits, first = bits, fused.linears[0].weight  # all have the same inputs
        known = (moments or {}).get(first.source.name) if isinstance(first, StoredParameter) else None
        self._in_four_bits = None if known is None else partial(rounded, moments=known)
        super().__init__(fused, kept)

    def _lay_out(self, fused: FusedLinear, kept: Sequence[UInt8[Tensor, " bytes"]]) -> None:
        tiles = tile_definitions(torch.bfloat16, self.num_in)  # the products are those of integers, in any dtype
        definitions = native.streamed(), *native.definitions_of(self.dtype), *tiles
        source = Path(__file__).with_name("quantized_linear.cpp")
        self._kernel = native.load(source, *definitions, structures=(LinearCall,)).linear
        weights = [linear.weight for linear in fused.linears]
        self.is_exact = all(stored_integers(weight, self._bits) for weight in weights)
        start, num_tiles = 0, -(-self.num_out // TILE)  # the last tile is padded with zeros
        self._arrays: tuple[Tensor, ...] = ()
        if kept:
            dtypes = torch.int32, torch.float32, torch.uint8
            self._arrays = tuple(x.view(dtype).view(num_tiles, -1, TILE) for x, dtype in zip(kept, dtypes, strict=True))
        for piece in () if kept else quantized(weights, self._bits, self._in_four_bits):
            columns = _columns(piece)
            self._arrays = self._arrays or tuple(x.new_zeros(num_tiles, x.shape[1], TILE) for x in columns)
            self._write_columns(columns, start)
            start += len(piece.scales)
        words, scales, zeros = self._arrays
        self._pointers = words.data_ptr(), scales.data_ptr(), zeros.data_ptr()
        self._group_size = self.num_in // scales.shape[1]
        self.scratch_bytes = self.num_in + 8 * scales.shape[1]  # integers, and a scale and a sum per group

    def _write_weight(self, values: Float[Tensor, "outputs in"], start: int) -> None:
        self._write_columns(_columns(quantize(values, self._bits, self._group_size, self._in_four_bits)), start)

    def _write_columns(self, columns: Sequence[Tensor], start: int) -> None:
        for tiles, values in zip(self._arrays, columns, strict=True):
            write_outputs(tiles, values, start)

    def rows(self, outputs: Int[Tensor, " n"]) -> Float[Tensor, "n in"]:
        words, scales, zeros = (tiles[outputs // TILE, :, outputs % TILE] for tiles in self._arrays)
        integers = words.view(torch.uint8)
        if self._bits == 4:
            groups = integers.unflatten(1, (-1, 1, 4))
            integers = torch.cat((groups & 15, groups >> 4), dim=2).flatten(1)
        found: Tensor = QuantizedWeight(self._bits, integers, scales, zeros).widened().to(self.dtype)
        return found

    def arrays(self) -> list[Tensor]:
        """Return the tensors that hold the weights: integers, scales and zeros."""
        return [*self._arrays]


def _columns(weight: QuantizedWeight) -> tuple[Int32[Tensor, "out words"], Tensor, Tensor]:
    """Return the integers, four inputs in a word, the scales and the zeros.

    In 4 bits, the upper halves of a word's bytes are the next four inputs.
    """
    words = weight.integers.unflatten(1, (-1, 4))
    if weight.bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    return words.flatten(1).contiguous().view(torch.int32), weight.scales, weight.zeros
