"""The plain definition of request adapters: each row's adapter adds an update to the output of a linear layer.

    y = x @ W.T + (x @ A_i.T) @ B_i.T * scale_i,  for the rows of adapter i

In: the model's linear layers, and the step's rows. Out: the layers' outputs, changed. The kernels of fast/cpu/lora.h and
fast/cuda/lora.py compute the same. This file does not know requests or files.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.features.adapters.lora import LowRankUpdate
from nanoinfer.features.quantization.rounding import QuantizedLinear
from nanoinfer.features.training.loaded_weights import HookInKernels
from nanoinfer.system.transfer import integers_on_device


class AdapterMapping:
    """The index of the adapter that each row of the step uses. All layers of a model share an AdapterMapping."""

    def __init__(self, max_loras: int, max_rank: int) -> None:
        """max_loras: the most adapters that may be active. max_rank: the highest rank of an adapter."""
        self.max_loras, self.max_rank = max_loras, max_rank
        self.num_rows = 0  # of the step, without padding
        self._step: tuple[list[int], torch.device] = [], torch.device("cpu")
        self._rows: dict[int, Tensor] | None = {}
        # gets the indices of each step: a CPUMapping (fast/cpu/lora.py) or RowIndices (fast/cuda/lora.py). None: no kernel
        # computes layers with adapters
        self.kernels: Any = None

    def set(self, indices: list[int], device: torch.device) -> None:
        """Note the step's rows. indices: the adapter index of each row. -1: the row has no adapter."""
        self.num_rows, self._step, self._rows = len(indices), (indices, device), None
        if self.kernels is not None:
            self.kernels.set(indices)

    @property
    def rows(self) -> dict[int, Tensor]:
        """Adapter index -> the numbers of the step's rows that use it. They are copied when a hook first reads them."""
        if self._rows is None:
            rows: dict[int, list[int]] = {}
            for row, index in enumerate(self._step[0]):
                rows.setdefault(index, []).append(row)
            rows.pop(-1, None)
            self._rows = dict(zip(rows, integers_on_device(list(rows.values()), self._step[1]), strict=True)) if rows else {}
        return self._rows


class AdaptedLinear(HookInKernels):
    """The adapters of a linear layer. It is a forward hook of the layer, unless a kernel computes the layer."""

    def __init__(self, linear: nn.Linear | QuantizedLinear, mapping: AdapterMapping) -> None:
        self.mapping = mapping
        # What the layer's kernels read (CPUAdapters of fast/cpu/lora.py, LowRankUpdates), each with the layer's index in it.
        self.kernels: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Adds to the outputs by kernels, given x and the outputs. None: torch does.
        self.add: Callable[[Tensor, Tensor], Tensor] | None = None
        self._updates: dict[int, LowRankUpdate | None] = {}  # adapter index -> update
        linear.register_forward_hook(self)

    def put(self, adapter_index: int, update: LowRankUpdate | None) -> None:
        """Give an adapter index this update, replacing the previous one. None: the adapter does not change this layer."""
        if self.add is None:
            self._updates[adapter_index] = update
        for kernel, layer_index in self.kernels.items():
            kernel.put(adapter_index, layer_index, update)

    def __call__(self, linear: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
        x = inputs[0]
        if self.add is not None:
            return self.add(x, out)
        for index, rows in self.mapping.rows.items():
            if (update := self._updates.get(index)) is not None:
                check_rows(x, self.mapping.num_rows)
                out[rows] += x[rows] @ update.a.T @ update.b.T * update.scale
        return out


def check_rows(x: Tensor, num_rows: int) -> None:
    """Raise UnsupportedError if a layer's rows are not those of the step."""
    if len(x) != num_rows:
        raise UnsupportedError(
            f"a linear layer has {len(x)} rows in a step of {num_rows}; adapters of requests need models whose layers compute "
            "every row, so use LLM(lora=path)"
        )


def shape_of(linear: nn.Linear | QuantizedLinear) -> tuple[int, ...]:
    """Return the shape of a layer's weight, [out, in]."""
    return tuple((linear.weight.integers if isinstance(linear, QuantizedLinear) else linear.weight).shape)
