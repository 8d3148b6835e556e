"""What the layers of a model keep if they differ: which share blocks, and how many bytes. It imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.attention.cache_sizes import CacheSizes, LayerSizes, NumberType
from nanoinfer.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the keys and values of the same tokens, so that they share a block table of each sequence."""

    window: int | None  # the number of tokens that a query attends to, itself included. None: all, so every block is kept
    layers: tuple[int, ...]


def kv_groups(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Group the layers of a model by their windows. windows: the window of each layer, in tokens. None: no window.

    The groups share a pool of blocks, and a block has a place for each layer of a group. So that few places stay empty, the
    layers of the more frequent kind are several groups of as many layers as the other kind has.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    size = min(map(len, layers_of.values()))
    return tuple(
        KVGroup(window, tuple(layers[i : i + size]))
        for window, layers in layers_of.items()
        for i in range(0, len(layers), size)
    )


@dataclass(frozen=True, slots=True)
class HybridSizes(CacheSizes):
    """CacheSizes whose num_layers is the number of layers of the largest group, each of which has a place in a block."""

    groups: tuple[KVGroup, ...]  # the layers that have keys and values
    has_sinks: bool = False  # whether some layers have attention sinks, which a backend must support
    num_state_layers: int = 0  # the number of layers that keep a state instead (Recur in states.py)
    state_shapes: tuple[tuple[int, ...], ...] = ()  # of a state's tensors in one layer. (): no layer keeps a state

    @classmethod
    def of(cls, config: LayerSizes) -> "HybridSizes":
        """Read a config. Configs of families whose layers are not all alike have some of the fields in `usual`."""
        usual: dict[str, Any] = {"layer_windows": (), "has_sinks": False, "num_state_layers": 0, "state_shapes": ()}
        usual["num_attention_layers"] = config.num_hidden_layers
        windows, *others, num_layers = (getattr(config, name, value) for name, value in usual.items())
        groups = kv_groups(windows or [None] * num_layers)
        return cls(largest_of(groups), config.num_key_value_heads, config.head_dim, groups, *others)

    @property
    def num_attention_layers(self) -> int:
        """The number of layers that have keys and values."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def bytes_per_state(self) -> int:
        """The bytes of a sequence's state in all layers, in fp32."""
        return 4 * self.num_state_layers * sum(map(math.prod, self.state_shapes))

    def num_blocks_for(self, num_tokens: int, block_size: int, chunk_size: int) -> int:
        return most_blocks(num_tokens, self.windows, block_size, chunk_size)

    def num_states_in(self, memory: int, max_num_seqs: int) -> int:
        return num_states_in(memory, self.bytes_per_state, max_num_seqs)

    def bytes_per_token(self, dtype: NumberType) -> int:
        """The bytes of a token's keys and values in all layers."""
        return self.bytes_per_block(1, dtype) // self.num_layers * self.num_attention_layers


def most_blocks(num_tokens: int, windows: Sequence[int | None], block_size: int, chunk_size: int) -> int:
    """Return the most blocks that a sequence holds at a time, while it grows to num_tokens by at most chunk_size at a time.

    In a group with a window these are the blocks of the window and the chunk, plus one if they begin inside a block.

    >>> most_blocks(4000, [None, 512], block_size=64, chunk_size=256)
    76
    """
    num_for_all = -(-num_tokens // block_size)
    return sum(
        num_for_all if window is None else min(num_for_all, -(-(window + chunk_size) // block_size) + 1) for window in windows
    )


def num_states_in(memory: int, state_bytes: int, max_num_seqs: int) -> int:
    """Return how many states half of the memory holds, in bytes, but at most two for each running sequence.

    Of two, one is for a checkpoint. state_bytes: the bytes of a state. 0: the model keeps no states.

    Raises: InvalidValueError if no state fits.
    """
    if not state_bytes:
        return 0
    if memory // 2 < state_bytes:
        raise InvalidValueError(
            f"half of the cache's {memory} bytes must hold the state of a sequence, {state_bytes} bytes; raise kv_cache_memory"
        )
    return min(memory // 2 // state_bytes, 2 * max_num_seqs)


def largest_of(groups: Sequence[KVGroup]) -> int:
    """Return the number of layers of the largest group."""
    return max(len(group.layers) for group in groups)
