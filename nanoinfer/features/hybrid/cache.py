"""The KV cache of a model whose layers form groups or keep states.

A block has a place for each layer of a group. The layers of another group have the same places, in blocks of their own.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache, zeros

# Of each layer that keeps a state, its tensors [num_state_slots + 1, ...]. The last slot holds the state before any token.
States = list[tuple[Tensor, ...]]


def make_states(
    num_layers: int, num_state_slots: int, shapes: Sequence[tuple[int, ...]], device: torch.device | str = "cpu"
) -> States:
    """Make the state slots of all layers, in fp32. shapes: the shapes of a state's tensors in one layer."""
    sizes = [(num_state_slots + 1, *shape) for shape in shapes]
    return [tuple(zeros(size, torch.float32, torch.device(device)) for size in sizes) for _ in range(num_layers)]


class HybridCache(KVCache):
    """A KVCache with the states of the layers that keep one. Its KV groups share the blocks."""

    def __init__(self, *, num_groups: int, states: States, **options: Any) -> None:
        """states: empty if no layer keeps a state. options: the arguments of KVCache."""
        super().__init__(**options)
        self.num_groups, self.states = num_groups, states
        self.attached: list[Tensor] = []  # a drafter's, for the same tokens

    def tensors(self) -> list[Tensor]:
        return [*self.pages, *chain(*self.states), *self.attached]


def states_of(cache: KVCache) -> States:
    """Return the state slots of a cache. Empty: no layer keeps a state."""
    return cache.states if isinstance(cache, HybridCache) else []
