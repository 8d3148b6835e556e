"""Linear layers on a CPU: weights are laid out once for dense_linear.cpp or tile_linear.cpp, which also apply what was fused.

In: a FusedLinear. Out: PackedLinear, which makes the kernel calls of programs. quantized.py has the layers in 8 or 4 bits.

dense_linear.cpp takes 0.45 to 0.9 of oneDNN's time at one row, 0.6 to 1.0 at 16, 0.9 to 1.0 at 64 and 0.97 to 1.07 at 1,020 (2
cores of an AMD EPYC, AVX512-BF16). A row's bits do not depend on the number of rows, which oneDNN does not promise.
"""

import ctypes
from collections.abc import Collection, Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from itertools import chain
from math import inf
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor, nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import NOTHING, KernelCall, Program, Slice, fields, tile_definitions
from nanoinfer.fast.cpu.threads import one_torch_thread
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.training.stored import pieces_of
from nanoinfer.models.layers import Hidden, Ids, Untraced

if TYPE_CHECKING:
    from nanoinfer.fast.cpu.lora import CPUAdapters

ACTIVATION_CODES = {None: 0, "silu": 1, "gelu_tanh": 2}  # as in linear.h


class LinearCall(ctypes.Structure):
    """The arguments of the kernels (linear.h)."""

    _fields_ = fields(
        (Slice, "x factor residual out"),
        (c_int64, "scratch"),
        (c_void_p, "weight scales zeros bias"),
        (c_int64, "num_out num_in group_size bits activation"),
        (c_void_p, "adapted"),
        (c_int64, "is_packed needed"),
    )


class PackedLinear:
    """A linear layer in the layout of its kernel.

    Args:
        kept: the bytes of `arrays`, from an earlier start. Empty: the weights are laid out.

    Raises:
        UnsupportedError: the kernel does not support the dtype or the number of inputs, or cannot be compiled.
    """

    is_exact = True  # whether `rows` returns the numbers of the checkpoint
    scratch_bytes: int  # the memory that a call needs for each row
    _kernel: Any  # a function of a library
    _pointers: tuple[int | None, int | None, int | None]  # weight, scales and zeros
    _group_size, _bits = 0, 0  # of integers
    _is_packed = False

    def __init__(self, fused: FusedLinear, kept: Sequence[UInt8[Tensor, " bytes"]] = ()) -> None:
        self.num_in, self.num_out, self.dtype = fused.in_features, fused.out_features, fused.linears[0].weight.dtype
        self._bias, self._activation = fused.merged_bias(), ACTIVATION_CODES[fused.activation]
        self._lay_out(fused, kept)
        self._adapters = adapters_of(fused, self.dtype)

    def _lay_out(self, fused: FusedLinear, kept: Sequence[UInt8[Tensor, " bytes"]]) -> None:
        """Load the kernel, and lay out the weights for it."""
        dtype, num_in = self.dtype, self.num_in
        tiles = tile_definitions(dtype, num_in)
        source = Path(__file__).with_name("tile_linear.cpp" if tiles else "dense_linear.cpp")
        library = native.load(source, native.streamed(), *native.definitions_of(dtype), *tiles, structures=(LinearCall,))
        names = ("tile_size", "num_per_term", "scratch_bytes_per_input", "packed_bytes_per_input")
        tile, per_term, scratch, packed = (c_int64.in_dll(library, name).value for name in names)
        if num_in % per_term:
            raise UnsupportedError(f"dense_linear.cpp needs inputs in multiples of {per_term}, got {num_in}")
        self._is_packed = not tiles and packs_faster(library, dtype)
        self.scratch_bytes, self._kernel = (packed if self._is_packed else scratch) * num_in, library.linear
        # [tiles, terms, tile, per_term]: a tile has each term of all its outputs in turn. The last tile is padded with zeros.
        sizes = -(-self.num_out // tile), num_in // per_term, tile, per_term
        if kept:
            self._weight = kept[0].view(dtype).view(sizes)
        else:
            self._weight = fused.linears[0].weight.new_empty(sizes)
            self._weight[-1] = 0
        self._pointers = self._weight.data_ptr(), None, None
        start = 0
        for piece in () if kept else chain.from_iterable(pieces_of(linear.weight) for linear in fused.linears):
            self.write("weight", piece, start)
            start += len(piece)

    def write(self, name: str, values: Float[Tensor, "*shape"], start: int) -> None:
        """Replace the weight or the bias of the outputs from `start` on, in place, since programs hold the addresses."""
        if name == "bias":
            assert self._bias is not None
            self._bias[start : start + len(values)] = values
        else:
            self._write_weight(values, start)

    def _write_weight(self, values: Float[Tensor, "outputs in"], start: int) -> None:
        write_outputs(self._weight, values, start)

    def rows(self, outputs: Int[Tensor, " n"]) -> Float[Tensor, "n in"]:
        """Return the weights of some outputs."""
        tile = self._weight.shape[2]
        return self._weight[outputs // tile, :, outputs % tile].flatten(1)

    def arrays(self) -> list[Tensor]:
        """Return the tensors that hold the weights."""
        return [self._weight]

    def call(
        self, *, x: Slice, out: Slice, scratch: int, factor: Slice = NOTHING, residual: Slice = NOTHING, needed: int = -1
    ) -> KernelCall:
        """Compute out = residual + factor * activation(x @ weight.T + bias). out may be the slice of factor or of residual.

        Args:
            scratch: the index of the batch's array that has scratch_bytes for each row.
            needed: the index of the batch's array that says which outputs are needed (linear.h). -1: all.
        """
        arguments = LinearCall(
            x, factor, residual, out, scratch, *self._pointers, None if self._bias is None else self._bias.data_ptr(),
            self.num_out, self.num_in, self._group_size, self._bits, self._activation,
            self._adapters and self._adapters.address, self._is_packed, needed,
        )  # fmt: skip
        return KernelCall(self._kernel, arguments)


@cache
def packs_faster(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether dense_linear.cpp takes less time for many rows if it packs them, which gives the same bits.

    It is tried once, because processors differ. The times of both forms are a thread's own, the least of some runs in turns.
    """
    num_rows, num_in, num_out = 96, 3072, 192  # rows that lie a multiple of 4,096 bytes apart, and half of a second cache
    weight = torch.zeros(2 * num_in * num_out, dtype=dtype)
    start = weight.data_ptr() + -weight.data_ptr() % 64
    arrays = (
        torch.empty(num_rows, num_out, dtype=dtype),
        torch.zeros(num_rows, num_in, dtype=dtype),
        torch.empty(num_rows, num_in),
    )
    seconds = {False: inf, True: inf}
    for is_packed in (False, True) * 5:
        arguments = LinearCall(
            Slice(1, 0, num_in), NOTHING, NOTHING, Slice(0, 0, num_out), 2, start, None, None, None, num_out, num_in, 0, 0, 0,
            None, is_packed, -1,
        )  # fmt: skip
        program = Program([KernelCall(library.linear, arguments)])
        with one_torch_thread(1):
            begin = thread_time()
            program(num_rows, arrays)
            seconds[is_packed] = min(seconds[is_packed], thread_time() - begin)
    return seconds[True] < 0.97 * seconds[False]


class KernelLinear(nn.Module):
    """A linear layer outside of the programs, such as the LM head. others: which of factor and residual a call gets."""

    def __init__(self, packed: PackedLinear, others: Collection[str] = ()) -> None:
        super().__init__()
        self._packed = packed
        out = Slice(0, 0, packed.num_out)
        places: dict[str, Any] = {name: Slice(3 + i, 0, packed.num_out) for i, name in enumerate(others)}
        self._program = Program([packed.call(x=Slice(1, 0, packed.num_in), out=out, scratch=2, **places)])

    def forward(self, x: Float[Tensor, "*rows in"], **others: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows out"]:
        packed = self._packed
        if x.dtype != packed.dtype or x.shape[-1] != packed.num_in:
            raise UnsupportedError(
                f"the layer takes rows of {packed.num_in} numbers in {packed.dtype}, got {tuple(x.shape)} in {x.dtype}"
            )
        out, num_rows = x.new_empty((*x.shape[:-1], packed.num_out)), x.numel() // packed.num_in
        arrays = (other.expand(out.shape).contiguous() for other in others.values())
        self._program(num_rows, (out, x.contiguous(), scratch_for(num_rows * packed.scratch_bytes, x), *arrays))
        return out


class KernelEmbedding(Untraced):
    """An embedding whose table is the weight of the tied LM head, as the head's kernel reads it."""

    def __init__(self, head: PackedLinear) -> None:
        super().__init__()
        self._head = head

    def forward(self, input_ids: Ids) -> Hidden:
        return self._head.rows(input_ids)


def write_outputs(tiles: Shaped[Tensor, "tiles columns tile *rest"], values: Shaped[Tensor, "outputs ..."], start: int) -> None:
    """Write the numbers of the outputs from `start` on, in place. A tile has each column of all its outputs in turn."""
    by_output = tiles.transpose(1, 2)  # [tiles, tile, columns, *rest]
    tile = by_output.shape[1]
    values, end = values.unflatten(1, by_output.shape[2:]), start + len(values)
    first_whole, end_whole = -(-start // tile), end // tile
    if first_whole < end_whole:
        whole = values[first_whole * tile - start : end_whole * tile - start]
        by_output[first_whole:end_whole] = whole.unflatten(0, (-1, tile))
    for i in {start // tile, end_whole} - set(range(first_whole, end_whole)):  # tiles that are partly replaced
        first, last = max(start, i * tile), min(end, (i + 1) * tile)
        if first < last:
            by_output[i, first - i * tile : last - i * tile] = values[first - start : last - start]


def adapters_of(fused: FusedLinear, dtype: torch.dtype) -> "CPUAdapters | None":
    """Return the adapters of the layers, which are forward hooks. None: requests may adapt none of the layers."""
    if not any(linear._forward_hooks for linear in fused.linears):
        return None
    from nanoinfer.fast.cpu.lora import CPUAdapters
    from nanoinfer.features.adapters.layers import AdaptedLinear

    hooks = [[hook for hook in linear._forward_hooks.values() if isinstance(hook, AdaptedLinear)] for linear in fused.linears]
    return CPUAdapters(fused, dtype, [hook[0] if hook else None for hook in hooks]) if any(hooks) else None


def scratch_for(num_bytes: int, like: Tensor) -> Tensor | None:
    """Allocate memory for a kernel's intermediate results, on the device of a tensor."""
    return like.new_empty(num_bytes // 4 + 1, dtype=torch.int32) if num_bytes else None
