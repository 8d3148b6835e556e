"""The KV cache of a model whose layers form groups or keep states.

A block has a place for each layer of a group. The layers of another group have the same places, in blocks of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache, zeros
from nanoinfer.features.int8_cache.cache import Int8Cache


class StateCache:
    """A pool of state slots, each of which has the tensors of a state in every layer that keeps a state, in fp32."""

    def __init__(
        self, *, num_layers: int, num_state_slots: int, shapes: Sequence[tuple[int, ...]], device: torch.device | str = "cpu"
    ) -> None:
        """shapes: the shapes of a state's tensors in one layer."""
        self._layers = [
            tuple(zeros((num_state_slots + 1, *shape), torch.float32, torch.device(device)) for shape in shapes)
            for _ in range(num_layers)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer]

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """Return the tensors of one layer, each [num_state_slots + 1, ...]. The last slot holds the state before any token."""
        return self._layers[layer]


class HybridCache(KVCache):
    """A KVCache with the states of the layers that keep one.

    Attributes:
        num_groups: the number of KV groups, which share the blocks.
        states: the state slots. None: no layer keeps a state.
        attached: a drafter's tensors for the same tokens.
    """

    def __init__(self, *, num_groups: int, states: StateCache | None, **options: Any) -> None:
        """options: the arguments of KVCache."""
        super().__init__(**options)
        self.num_groups, self.states = num_groups, states
        self.attached: list[Tensor] = []

    def tensors(self) -> list[Tensor]:
        return [*self.pages, *(() if self.states is None else self.states.tensors), *self.attached]


class HybridInt8Cache(HybridCache, Int8Cache):
    """A HybridCache whose keys and values are integers."""


def states_of(cache: KVCache) -> StateCache | None:
    """Return the state slots of a cache. None: no layer keeps a state."""
    return cache.states if isinstance(cache, HybridCache) else None
