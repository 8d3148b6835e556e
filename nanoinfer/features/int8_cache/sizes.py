"""The size of a stored head in a cache of 8-bit integers. This file imports no torch."""

from dataclasses import replace
from typing import TypeVar

from nanoinfer.attention.cache_sizes import CacheSizes, NumberType

SCALE_BYTES = 4  # the size of the scale that follows a head of 8-bit integers

Sizes = TypeVar("Sizes", bound=CacheSizes)


def stored_in(sizes: Sizes, dtype: NumberType) -> Sizes:
    """Return the sizes of a cache of this dtype: in 8 bits, a head has its scale after it."""
    return replace(sizes, head_dim=sizes.head_dim + SCALE_BYTES) if dtype.itemsize == 1 else sizes
