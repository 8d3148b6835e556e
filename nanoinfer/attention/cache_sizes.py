"""What the layers of a model keep: how many bytes for each token and for each sequence, and which layers share blocks.

In: a model's config. Out: CacheSizes. This file imports no torch, so that a machine without it can compute sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from nanoinfer.errors import InvalidValueError

SCALE_BYTES = 4  # the size of the scale that follows a head of 8-bit integers
# On a CPU the cache takes at most this many bytes and at most half of the free memory, unless kv_cache_memory is set.
DEFAULT_CPU_MEMORY = 4 * 2**30


class NumberType(Protocol):
    """A dtype of torch or of numpy, or what else has the size of a number. A size of 1 byte means integers with scales."""

    @property
    def itemsize(self) -> int: ...


@runtime_checkable
class LayerSizes(Protocol):
    """The fields that the cache reads of a model's config. CacheSizes.of lists further fields that some configs have."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the keys and values of the same tokens, so that they share a block table of each sequence.

    window: the number of tokens that a query attends to, itself included. None: all tokens, so that every block is kept.
    """

    window: int | None
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
class CacheSizes:
    """What the layers of a model keep for each token and for each sequence, read once from its config.

    Attributes:
        groups: the layers that have keys and values.
        has_sinks: whether some layers have attention sinks, which a backend must support.
        num_state_layers: the number of layers that keep a state instead (Recur in base.py).
        state_shapes: the shapes of a state's tensors in one layer. (): no layer keeps a state.
    """

    num_kv_heads: int
    head_dim: int
    groups: tuple[KVGroup, ...]
    has_sinks: bool
    num_state_layers: int
    state_shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, config: LayerSizes) -> "CacheSizes":
        """Read a config. Configs of families whose layers are not all alike have some of the fields in `usual`."""
        usual: dict[str, Any] = {"layer_windows": (), "has_sinks": False, "state_shapes": (), "num_state_layers": 0}
        usual["num_attention_layers"] = config.num_hidden_layers
        given = {name: getattr(config, name, value) for name, value in usual.items()}
        windows = given["layer_windows"] or [None] * given["num_attention_layers"]
        return cls(
            config.num_key_value_heads,
            config.head_dim,
            kv_groups(windows),
            given["has_sinks"],
            given["num_state_layers"],
            given["state_shapes"],
        )

    @property
    def num_layers(self) -> int:
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
        """Return the most blocks that a sequence holds at a time, while it grows to num_tokens. See most_blocks."""
        return most_blocks(num_tokens, self.windows, block_size, chunk_size)

    def bytes_per_token(self, dtype: NumberType) -> int:
        """The bytes of a token's keys and values in all layers."""
        return bytes_per_block(
            num_layers=self.num_layers, block_size=1, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )

    def bytes_per_block(self, block_size: int, dtype: NumberType) -> int:
        """The bytes of a block, which has a place for each layer of the largest group."""
        return block_size * self.bytes_per_token(dtype) // self.num_layers * max(len(group.layers) for group in self.groups)


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


def stored_size(head_dim: int, dtype: NumberType) -> int:
    """Return the number of elements of a stored head."""
    return head_dim + SCALE_BYTES if dtype.itemsize == 1 else head_dim


def bytes_per_block(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: NumberType) -> int:
    """Return 2 (k and v) * layers * tokens * heads * head_dim * bytes of a number. In 8 bits, add SCALE_BYTES for each head.

    >>> from numpy import dtype
    >>> bytes_per_block(num_layers=12, block_size=16, num_kv_heads=12, head_dim=64, dtype=dtype("float32"))
    1179648
    """
    return 2 * num_layers * block_size * num_kv_heads * stored_size(head_dim, dtype) * dtype.itemsize
