"""The kernel of Gated DeltaNet's recurrence (delta.cpp). models/gated_delta.py has its definition, DeltaRecurrence.

It computes tokens one after the other, in prompts too, so a token's bits depend neither on the batch nor on the chunk.
"""

import ctypes
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.attention.base import Recur
from nanoinfer.attention.states import AttendWithStates
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from nanoinfer.models.gated_delta import DeltaRecurrence


class DeltaCall(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "z", "b", "a")),
        *((name, c_int64) for name in ("qkv_stride", "z_stride", "b_stride", "a_stride")),
        *((name, c_void_p) for name in ("out", "convolution", "rates", "dt_bias", "norm", "windows", "memories")),
        *((name, c_void_p) for name in ("first_pieces", "pieces")),
        *((name, c_int64) for name in ("num_sequences", "num_key_heads", "num_threads")),
        ("eps", c_double),
    )


class KernelRecurrence:
    """Computes what a DeltaRecurrence does.

    Raises:
        UnsupportedError: there is no kernel for its sizes or for this dtype.
    """

    def __init__(self, plain: DeltaRecurrence, dtype: torch.dtype) -> None:
        if plain.kernel_size < 2:
            raise UnsupportedError(f"linear_conv_kernel_dim must be >= 2 for the C++ kernel, got {plain.kernel_size}")
        self._plain, self._dtype = plain, dtype
        group = plain.num_value_heads // plain.num_key_heads
        sizes = {"KEY_DIM": plain.key_dim, "VALUE_DIM": plain.value_dim, "GROUP": group, "KERNEL": plain.kernel_size}
        definitions = (*native.definitions_of(dtype), *(f"{name}={size}" for name, size in sizes.items()))
        self._library = native.load(Path(__file__).with_name("delta.cpp"), *definitions, structures=(DeltaCall,))
        self._weights: tuple[Tensor, ...] = ()  # of the layer, in the kernel's form

    def forget_weights(self) -> None:
        """The layer's weights have changed (loading/update.py)."""
        self._weights = ()

    def forward(
        self, attend: Recur, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> Tensor:
        """See DeltaRecurrence.forward. It computes a step without slots, and one in another dtype."""
        if not isinstance(attend, AttendWithStates) or qkv.dtype != self._dtype:
            return DeltaRecurrence.forward(self._plain, attend, qkv, z, b, a, weights)
        if not self._weights:
            convolution, a_log, dt_bias, norm = (weight.float() for weight in weights)
            self._weights = (convolution.squeeze(1).T.contiguous(), a_log.exp(), dt_bias.contiguous(), norm.contiguous())
        rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, z, b, a)]
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        parts = attend.states.layer(self._plain.layer)
        first_pieces, pieces = attend.piece_tensors
        call = DeltaCall(
            *(x.data_ptr() for x in rows),
            *(x.stride(0) for x in rows),
            *(x.data_ptr() for x in (out, *self._weights, *parts, first_pieces, pieces)),
            *(len(first_pieces) - 1, self._plain.num_key_heads, torch.get_num_threads()),
            self._plain.eps,
        )
        self._library.advance(ctypes.byref(call))
        return out
