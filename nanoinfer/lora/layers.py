"""The plain definition of request adapters: each row's adapter adds an update to the output of a linear layer.

    y = x @ W.T + (x @ A_i.T) @ B_i.T * scale_i,  for the rows of adapter i

In: the model's linear layers, and the step's rows. Out: the layers' outputs, changed. The kernels of fast/cpu/lora.h compute
the same. This file does not know requests or files.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.loading.formats.lora import LowRankUpdate
from nanoinfer.loading.quantization import QuantizedLinear

if TYPE_CHECKING:
    from nanoinfer.fast.cpu.lora import KernelAdapters, KernelRows


class AdapterRows:
    """The slot of the adapter that each row of the step uses. All layers of a model share an AdapterRows.

    Attributes:
        num_rows: the number of the step's rows, without padding.
        by_slot: slot -> the indices of the rows that use it.
        num_slots, max_rank: the limits of the slots.
        kernels: receives each step's slots. None: no kernel computes a layer with adapters.
    """

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank = num_slots, max_rank
        self.num_rows = 0
        self.by_slot: dict[int, Tensor] = {}
        self.kernels: KernelRows | None = None

    def set(self, slots: list[int], device: torch.device) -> None:
        """Note the step's rows. slots: the slot of each row. -1: the row has no adapter."""
        self.num_rows = len(slots)
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            rows.setdefault(slot, []).append(row)
        rows.pop(-1, None)
        self.by_slot = {slot: torch.tensor(indices, device=device) for slot, indices in rows.items()}
        if self.kernels is not None:
            self.kernels.set(slots if rows else [])


class AdaptedLinear:
    """The adapters of a linear layer. It is a forward hook of the layer, unless a kernel computes the layer.

    Attributes:
        kernels: the tables that the layer's kernels read (fast/cpu/lora.py), each with the layer's index in it.
    """

    def __init__(self, linear: nn.Linear | QuantizedLinear, rows: AdapterRows) -> None:
        self.rows = rows
        self.kernels: WeakKeyDictionary[KernelAdapters, int] = WeakKeyDictionary()
        self._updates: dict[int, LowRankUpdate] = {}  # slot -> update
        linear.register_forward_hook(self)

    def put(self, slot: int, update: LowRankUpdate | None) -> None:
        """Put an adapter's update into a slot, replacing the previous one. None: the adapter does not change this layer."""
        self._updates.pop(slot, None)
        if update is not None:
            self._updates[slot] = update
        for kernel, index in self.kernels.items():
            kernel.put(slot, index, update)

    def __call__(self, linear: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
        x = inputs[0]
        for slot, rows in self.rows.by_slot.items():
            if (update := self._updates.get(slot)) is not None:
                if len(x) != self.rows.num_rows:
                    raise UnsupportedError(
                        f"a linear layer has {len(x)} rows in a step of {self.rows.num_rows}; adapters of requests need models "
                        "whose layers compute every row, so use LLM(lora=path)"
                    )
                out[rows] += x[rows] @ update.a.T @ update.b.T * update.scale
        return out


def shape_of(linear: nn.Linear | QuantizedLinear) -> tuple[int, ...]:
    """Return the shape of a layer's weight, [out, in]."""
    return tuple((linear.weight.integers if isinstance(linear, QuantizedLinear) else linear.weight).shape)


AdaptedLayers = Mapping[nn.Module, AdaptedLinear]
