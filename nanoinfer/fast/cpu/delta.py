"""The kernel of Gated DeltaNet's recurrence (delta.cpp). features/hybrid/gated_delta.py has its definition, DeltaRecurrence.

It computes tokens one after the other, also those of prompts, so a token's bits depend neither on the batch nor on the chunk.
"""

import ctypes
from ctypes import c_double, c_int64, c_void_p
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.attention.base import Attend
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Program, Slice, fields
from nanoinfer.features.hybrid.gated_delta import DeltaRecurrence
from nanoinfer.features.hybrid.states import AttendWithStates
from nanoinfer.models.layers import Untraced


class DeltaArguments(ctypes.Structure):
    """The sequences of a step, and their states in all layers. kept: the tensors to which they point."""

    kept: tuple[object, ...]
    _fields_ = fields((c_void_p, "first_pieces pieces"), (c_int64, "num_sequences"), (c_void_p, "tensors"))


class DeltaCall(ctypes.Structure):
    _fields_ = fields(
        (Slice, "qkv z b a out"),
        (c_int64, "rows"),
        (c_void_p, "convolution rates dt_bias norm"),
        (c_int64, "layer num_key_heads"),
        (c_double, "eps"),
    )


def arguments_of(attend: Attend) -> DeltaArguments | None:
    """Return the arguments that all recurrences of a step share. None: its states have no state slots."""
    if not isinstance(attend, AttendWithStates):
        return None
    first_pieces, pieces = attend.piece_tensors
    tensors = [*chain(*attend.states)]
    addresses = (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    arguments = DeltaArguments(first_pieces.data_ptr(), pieces.data_ptr(), len(first_pieces) - 1, ctypes.addressof(addresses))
    arguments.kept = first_pieces, pieces, addresses
    return arguments


class KernelRecurrence(Untraced):
    """Computes the same as a DeltaRecurrence, alone or as a part of a program.

    Raises:
        UnsupportedError: no kernel supports these sizes or this dtype.
    """

    def __init__(self, plain: DeltaRecurrence, dtype: torch.dtype) -> None:
        super().__init__()
        if plain.kernel_size < 2:
            raise UnsupportedError(f"linear_conv_kernel_dim must be >= 2 for the C++ kernel, got {plain.kernel_size}")
        self._plain, self._dtype = (plain,), dtype  # a tuple hides the submodule from torch
        num_heads, width = plain.num_value_heads, plain.num_value_heads * plain.value_dim
        # How many numbers a token has in qkv, z, b and a
        self.widths = 2 * plain.num_key_heads * plain.key_dim + width, width, num_heads, num_heads
        group = num_heads // plain.num_key_heads
        sizes = {"KEY_DIM": plain.key_dim, "VALUE_DIM": plain.value_dim, "GROUP": group, "KERNEL": plain.kernel_size}
        definitions = (*native.definitions_of(dtype), *(f"{name}={size}" for name, size in sizes.items()))
        self._library = native.load(Path(__file__).with_name("delta.cpp"), *definitions, structures=(DeltaCall, DeltaArguments))
        self._weights: tuple[Tensor, ...] = ()  # of the layer
        self._laid_out: tuple[Tensor, ...] = ()  # the same, laid out for the kernel. Programs hold their addresses

    def take(self, weights: tuple[Tensor, ...]) -> None:
        """Use these weights of the layer from now on: see DeltaRecurrence.forward."""
        if not self._weights:
            self._weights = weights
            self.lay_out_weights()

    def lay_out_weights(self) -> None:
        """Lay out the layer's weights again after a change (features/training/loaded_weights.py)."""
        if not self._weights:
            return  # it has no weights yet
        convolution, a_log, dt_bias, norm = (weight.detach().float() for weight in self._weights)
        laid_out = convolution.squeeze(1).T, a_log.exp(), dt_bias, norm
        if not self._laid_out:
            self._laid_out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in laid_out)
        for to, values in zip(self._laid_out, laid_out, strict=True):
            to.copy_(values)

    def forward(self, attend: Attend, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """See DeltaRecurrence.forward."""
        self.take(weights)
        return self.compute(attend, qkv, z, b, a)

    def compute(self, attend: Attend, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Compute outside of a program. Steps without state slots, or in another dtype, run the definition."""
        arguments = arguments_of(attend)
        if arguments is None or qkv.dtype != self._dtype:
            return DeltaRecurrence.forward(self._plain[0], attend, qkv, z, b, a, self._weights)  # type: ignore[arg-type]
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        arrays = [*(x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, z, b, a)), out]
        slices = (Slice(array, 0, x.stride(0)) for array, x in enumerate(arrays))
        Program([self.call(*slices, rows=len(arrays))])(len(out), [*arrays, arguments])
        return out

    def call(self, *slices: Slice, rows: int) -> KernelCall:
        """Return a call in a program.

        slices: qkv, z, b, a and the result. rows: the index of the array that is a DeltaArguments.
        """
        addresses = (x.data_ptr() for x in self._laid_out)
        arguments = DeltaCall(*slices, rows, *addresses, self._plain[0].layer, self._plain[0].num_key_heads, self._plain[0].eps)
        return KernelCall(self._library.advance, arguments)
