"""What the layers of a model keep for each token: how many bytes.

In: a model's config. Out: CacheSizes. This file imports no torch, so that a machine without it can compute sizes.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

# On a CPU the cache takes at most this many bytes and at most half of the free memory, unless kv_cache_memory is set.
DEFAULT_CPU_MEMORY = 4 * 2**30


class NumberType(Protocol):
    """A dtype of torch or of numpy, or what else has the size of a number."""

    @property
    def itemsize(self) -> int: ...


@runtime_checkable
class LayerSizes(Protocol):
    """The fields that the cache reads of a model's config."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a block of the cache has."""

    num_layers: int  # the number of layers whose keys and values a block has
    num_kv_heads: int
    head_dim: int  # the number of elements of a stored head

    @classmethod
    def of(cls, config: LayerSizes) -> "CacheSizes":
        """Read the config of a model all of whose layers keep the keys and values of every token."""
        return CacheSizes(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group of layers, in tokens. None: all tokens."""
        return (None,)

    @property
    def bytes_per_state(self) -> int:
        """The bytes that a sequence takes besides its tokens."""
        return 0

    def num_blocks_for(self, num_tokens: int, block_size: int, chunk_size: int) -> int:
        """Return the most blocks that a sequence holds at a time, while it grows to num_tokens by chunk_size at a time."""
        return -(-num_tokens // block_size)

    def num_states_in(self, memory: int, max_num_seqs: int) -> int:
        """Return how many states a cache of so many bytes keeps."""
        return 0

    def bytes_per_token(self, dtype: NumberType) -> int:
        """The bytes of a token's keys and values in all layers."""
        return self.bytes_per_block(1, dtype)

    def bytes_per_block(self, block_size: int, dtype: NumberType) -> int:
        """The bytes of a block: 2 (k and v) * layers * tokens * heads * head_dim * bytes of a number."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * dtype.itemsize


def bytes_per_block(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: NumberType) -> int:
    """Return what CacheSizes.bytes_per_block returns.

    >>> from numpy import dtype
    >>> bytes_per_block(num_layers=12, block_size=16, num_kv_heads=12, head_dim=64, dtype=dtype("float32"))
    1179648
    """
    return CacheSizes(num_layers, num_kv_heads, head_dim).bytes_per_block(block_size, dtype)
