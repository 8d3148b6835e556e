"""What the layers of a model keep: how many bytes for each token and for each sequence, and which layers share blocks.

In: a model's config. Out: CacheSizes. This file imports no torch, so that a machine without it can compute sizes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

SCALE_BYTES = 4  # the size of the scale that follows a head of 8-bit integers


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

    def bytes_per_token(self, dtype: NumberType) -> int:
        """The bytes of a token's keys and values in all layers."""
        return bytes_per_block(
            num_layers=self.num_layers, block_size=1, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )

    def bytes_per_block(self, block_size: int, dtype: NumberType) -> int:
        """The bytes of a block, which has a place for each layer of the largest group."""
        return block_size * self.bytes_per_token(dtype) // self.num_layers * max(len(group.layers) for group in self.groups)


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
