"""The LM head with a copy of its weight in 8 bits, which tells which logits may be the largest. screen.cpp has the proof.

In: the hidden rows of a few sequences. Out: logits with the bits of the plain head, and -infinity in place of logits that are
smaller than the k largest. It is for greedy rows and for top_k, also with min_p, top_p and a temperature, and for the rows of
drafts. All logits are computed for other rows, by drafters that share the head, for log-probabilities, and where a stage before
the temperature changes logits.

A token of one stream takes the time of reading all weights, and the copy has half of the head's bytes in bfloat16.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.linear import PackedLinear, scratch_for, write_outputs
from nanoinfer.fast.cpu.program import KernelCall, Program, Slice, fields
from nanoinfer.fast.fuse import FusedLinear

TILE, UNIT = 32, 16  # as in screen.cpp and linear.h
GROUP_SIZES = 128, 64, 32  # the number of inputs that share a scale: the first that divides a layer's inputs
LEAST_SCALE = 2.0**-80
# Where it pays: CPU time of the plain head by that of the screened one, in bfloat16 (a thread of an AMD EPYC, Zen 4, in use by
# others; random weights, whose logits leave the most candidates). A head of 16 MB: 1.5. GPT-2's: 1.3 to 1.7 for 1 to 4 greedy
# rows, 1.3 for a row with top_k=100, 1.0 for 4 rows with 40, 0.9 for a row with 256.
LEAST_BYTES = 2**24  # of the head
MOST_ROWS, IDS_PER_CANDIDATE = 4, 400


def num_copy_bytes(head: nn.Linear) -> int:
    """Return the bytes of a head's copy in 8 bits, with a scale in fp32 for each group."""
    group_size = next(size for size in GROUP_SIZES if head.in_features % size == 0)
    return head.weight.numel() + 4 * head.weight.numel() // group_size


class ScreenCall(ctypes.Structure):
    """The arguments of screen.cpp."""

    _fields_ = fields(
        (Slice, "x lowest highest out"),
        (c_int64, "scratch needed k"),
        (c_void_p, "weight scales"),
        (c_int64, "num_out num_in group_size are_largest_known"),
    )


class ScreenedLinear(PackedLinear):
    """A linear layer without a bias and with inputs in multiples of GROUP_SIZES[-1]: see PackedLinear."""

    def __init__(self, fused: FusedLinear, *, kept: Sequence[UInt8[Tensor, " bytes"]] = ()) -> None:
        num_out, num_in = fused.out_features, fused.in_features
        group_size = next(size for size in GROUP_SIZES if num_in % size == 0)
        num_tiles = -(-num_out // TILE)
        if kept:
            self._words = kept[1].view(torch.int32).view(num_tiles, num_in // 4, TILE)
            self._scales = kept[2].view(torch.float32).view(num_tiles, num_in // group_size, TILE)
        else:
            self._words = torch.zeros(num_tiles, num_in // 4, TILE, dtype=torch.int32)
            self._scales = torch.zeros(num_tiles, num_in // group_size, TILE)
        super().__init__(fused, kept=kept[:1])
        source = Path(__file__).with_name("screen.cpp")
        library = native.load(source, native.streamed(), *native.definitions_of(self.dtype), structures=(ScreenCall,))
        x, out, num_units = Slice(0, 0, num_in), Slice(4, 0, num_out), 2 * num_tiles
        slices = x, Slice(1, 0, num_units), Slice(2, 0, num_units), out
        addresses = self._words.data_ptr(), self._scales.data_ptr()
        first, second = (ScreenCall(*slices, 3, 5, 6, *addresses, num_out, num_in, group_size, known) for known in (0, 1))
        bound, compute = KernelCall(library.bound, first), self.call(x=x, out=out, scratch=7, needed=5)
        choose, choose_again = KernelCall(library.choose, first), KernelCall(library.choose, second)
        self._bound = Program([bound])
        self._bound_and_compute = Program([bound, choose, compute, choose_again, compute])

    def write(self, name: str, values: Float[Tensor, "*shape"], start: int) -> None:
        """See PackedLinear.write."""
        super().write(name, values, start)
        for some in values.split(max(2**20 // self.num_in, 1)):  # so many that intermediate results take little memory
            groups = some.unflatten(1, (self._scales.shape[1], -1)).float()
            scales = (groups.abs().amax(2) / 127).clamp(min=LEAST_SCALE)
            integers = ((groups / scales.unsqueeze(2)).round() + 128).to(torch.uint8).flatten(1)
            write_outputs(self._words, integers.view(torch.int32), start)
            write_outputs(self._scales, scales, start)
            start += len(some)

    def arrays(self) -> list[Tensor]:
        """Return the tensors that hold the weights and their copy."""
        return [*super().arrays(), self._words, self._scales]

    def pays(self, num_rows: int, k: int) -> bool:
        """Whether largest_logits takes less time than all logits of these rows, even if the logits are close to each other."""
        return num_rows <= MOST_ROWS and num_rows * k * IDS_PER_CANDIDATE <= self.num_out

    def bounds(self, x: Float[Tensor, "rows in"]) -> tuple[Float[Tensor, "rows units"], Float[Tensor, "rows units"]]:
        """Compute two numbers in fp32 for every UNIT ids, between which the largest of their logits is."""
        arrays = self._arrays_for(x)
        self._bound(len(x), arrays)
        return arrays[1], arrays[2]

    def largest_logits(self, x: Float[Tensor, "rows in"], k: int) -> Float[Tensor, "rows vocab"]:
        """Compute the k largest logits of each row, and all that equal the k-th. Others may be -infinity."""
        out, needed = x.new_empty(len(x), self.num_out), torch.empty(2 * len(self._words), dtype=torch.uint8)
        scratch = scratch_for(len(x) * self.scratch_bytes, x)
        self._bound_and_compute(len(x), (*self._arrays_for(x), out, needed, torch.tensor([k]), scratch))
        return out

    def _arrays_for(self, x: Float[Tensor, "rows in"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the row, the bounds, which a call fills, and memory for its intermediate results."""
        lowest, highest = torch.empty(2, len(x), 2 * len(self._words))
        return x.contiguous(), lowest, highest, torch.empty(len(x), 3 * self._scales.shape[1] + self.num_in // 2)
