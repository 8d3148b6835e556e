"""Keep the adapters of requests in the layout in which the kernels of linear layers read them (lora.h).

In: updates of linear layers (features/adapters/layers.py) by adapter index, and the adapter indices of a step's rows. Out: the
addresses of both, which stay the same, so that programs need not know when an adapter is loaded. The matrices have the kernel's
dtype.
"""

import ctypes
from collections.abc import Sequence
from ctypes import addressof, c_double, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.fast.cpu.program import fields
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.adapters.layers import AdaptedLinear
from nanoinfer.features.adapters.lora import LowRankUpdate

RANKS, OUTPUTS = 4, 16  # as in lora.h


class LowRank(ctypes.Structure):
    _fields_ = fields((c_void_p, "a b"), (c_double, "scale"), (c_int64, "rank"))


class Adapted(ctypes.Structure):
    _fields_ = fields((c_void_p, "mapping changes starts"), (c_int64, "num_layers max_rank"))


class CPUMapping(ctypes.Structure):
    """The adapter indices of a step's rows, and memory for their products with A, which all kernels of a model share."""

    _fields_ = fields((c_int64, "num_rows"), (c_void_p, "indices products"))
    width = 0  # the number of products of a row
    kept: tuple[Tensor, ...]  # the tensors to which it points

    def set(self, indices: list[int]) -> None:
        indices = indices if any(index >= 0 for index in indices) else []
        self.kept = torch.tensor(indices, dtype=torch.int64), torch.empty(len(indices) * self.width)
        self.num_rows = len(indices)
        self.indices, self.products = (array.data_ptr() for array in self.kept)


class CPUAdapters:
    """The adapters of the layers that a kernel computes together."""

    def __init__(self, fused: FusedLinear, dtype: torch.dtype, layers: Sequence[AdaptedLinear | None]) -> None:
        """layers: the adapters of each fused layer. None: the layer has no adapters."""
        mapping = next(layer.mapping for layer in layers if layer is not None)
        kernel_mapping = mapping.kernels = mapping.kernels or CPUMapping()
        self._dtype, self._ends = dtype, [start + linear.out_features for linear, start in fused.starts()]
        max_rank = -(-mapping.max_rank // RANKS) * RANKS
        kernel_mapping.width = max(kernel_mapping.width, len(layers) * max_rank)
        self._starts = (c_int64 * (len(layers) + 1))(0, *self._ends)
        self._changes = (LowRank * (mapping.max_loras * len(layers)))()
        self._arguments = Adapted(
            addressof(kernel_mapping), addressof(self._changes), addressof(self._starts), len(layers), max_rank
        )
        self.address = addressof(self._arguments)  # of the kernel's argument
        self._arrays: dict[int, tuple[Tensor, ...]] = {}  # kept alive, by the index in _changes
        for index, layer in enumerate(layers):
            if layer is not None:
                layer.kernels[self] = index

    def put(self, adapter_index: int, layer_index: int, update: LowRankUpdate | None) -> None:
        """Keep an adapter's update of the layer with this index. update: None: the adapter does not change the layer."""
        place = adapter_index * len(self._ends) + layer_index
        if update is None:
            self._changes[place] = LowRank()
            self._arrays.pop(place, None)
            return
        start, end = self._starts[layer_index], self._ends[layer_index]
        missing = -len(update.a) % RANKS  # the ranks to be padded
        a = F.pad(update.a, (0, 0, 0, missing)).to(self._dtype).contiguous()
        b = F.pad(update.b.T, (start % OUTPUTS, -end % OUTPUTS, 0, missing)).to(self._dtype)
        b = b.unflatten(1, (-1, OUTPUTS)).transpose(0, 1).contiguous()  # [vectors, rank, OUTPUTS]
        self._arrays[place] = a, b
        self._changes[place] = LowRank(a.data_ptr(), b.data_ptr(), update.scale, len(a))
