"""The prefix cache of a model with several cache groups: KV groups, whose windows differ, and states.

A key stands for the same tokens in every group (scheduling/prefix_index.py), and each group has its own id for it: a block of
the common pool, or a state slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import repeat

from nanoinfer.features.hybrid.tables import NO_BLOCK
from nanoinfer.scheduling.pool import Pool
from nanoinfer.scheduling.prefix_index import Prefix, PrefixIndex

IN_STORE = -2  # in a prefix: this block is only in the store (features/disk_cache)

IsStored = Callable[[tuple[bytes, int]], bool]  # whether a store has the entry (key, group)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A KV group with its window in tokens, or the states. pool: counts its ids. ids: the id of each key in memory."""

    window: int | None
    pool: Pool
    ids: dict[bytes, int] = field(default_factory=dict)


class HybridPrefix(Prefix):
    """The keys of a prefix, each with its block in the first KV group."""

    def __init__(self, keys: Sequence[bytes] = (), tables: Sequence[list[int]] = ()) -> None:
        super().__init__(zip(keys, tables[0] if keys else (), strict=True))
        self.tables = tables  # for each cache group, the id of each key, or NO_BLOCK if the group does not need the block


def tables_in(prefix: Prefix) -> Sequence[list[int]]:
    return prefix.tables if isinstance(prefix, HybridPrefix) else ()  # without prefix caching it is an empty list


class HybridIndex(PrefixIndex):
    """The index of all contents in memory."""

    def __init__(self, groups: list[CacheGroup], block_size: int) -> None:
        """groups: the KV groups in their order, then the states if the model keeps any."""
        super().__init__(groups[0].pool, block_size)
        self.groups, self.ids = groups, groups[0].ids
        self.fingerprint = b""  # bytes on which all keys depend. b"": keys depend on salts and tokens alone
        self._complete = next(((group, number) for number, group in enumerate(groups) if group.window is None), (None, -1))

    # ---- queries

    def root(self, cache_salt: str | None) -> bytes:
        return sha256(self.fingerprint + (cache_salt or "").encode(errors="surrogatepass")).digest()

    def match(self, token_ids: list[int], cache_salt: str | None, is_stored: IsStored | None = None) -> HybridPrefix:
        """Return the longest prefix that all cache groups can serve.

        In a group with a window, only the blocks that the first query after the prefix reaches are needed. is_stored: whether
        an entry is in the store, whose blocks then count as well. None: only memory counts.
        """
        keys, (complete, number) = self.chain(token_ids, cache_salt), self._complete
        if is_stored is not None or complete is None:  # the prefix may continue after a block that is not in memory
            for _, key in self.further(keys, token_ids, len(token_ids) - 1, cache_salt):
                if complete and key not in complete.ids and not (is_stored and is_stored((key, number))):
                    break
                keys.append(key)
        found = [[*map(group.ids.get, keys, repeat(NO_BLOCK))] for group in self.groups]
        if is_stored is not None:
            for group, ids in enumerate(found):
                ids[:] = [IN_STORE if i < 0 and is_stored((key, group)) else i for key, i in zip(keys, ids, strict=True)]
        for length in range(len(keys), 0, -1):
            firsts = [first_reached(length * self.block_size, group.window, self.block_size) for group in self.groups]
            needed = [ids[first:length] for ids, first in zip(found, firsts, strict=True)]
            if not any(NO_BLOCK in ids for ids in needed):
                tables = [[NO_BLOCK] * first + ids for ids, first in zip(needed, firsts, strict=True)]
                return HybridPrefix(keys[:length], tables)
        return HybridPrefix()

    def group_of(self, key: bytes, pool: Pool, held: int) -> int:
        """Return the number of the group that has this id of a pool for the key. -1: none has it."""
        return next((i for i, group in enumerate(self.groups) if group.pool is pool and group.ids.get(key) == held), -1)

    # ---- changes

    def enter(self, blocks: list[tuple[bytes, bytes]], new: list[int], group: int = 0) -> list[int]:
        """Add an id for each content and key, except for keys that the group already has. Return the added ids."""
        entered, ids, pool = [], self.groups[group].ids, self.groups[group].pool
        for (content, key), block in zip(blocks, new, strict=True):
            if block != NO_BLOCK and ids.setdefault(key, block) == block:
                self.keys[content], pool.contents[block] = key, content
                entered.append(block)
        return entered

    def remove(self, block: int) -> None:
        key = self.keys[self.pool.contents[block]]
        self.remove_from(self.group_of(key, self.pool, block), key)

    def remove_from(self, group: int, key: bytes) -> None:
        """Remove a group's id from memory."""
        pool, removed = self.groups[group].pool, self.groups[group].ids.pop(key)
        if not any(key in other.ids for other in self.groups):
            del self.keys[pool.contents[removed]]
        pool.forget(removed)


def first_reached(position: int, window: int | None, block_size: int) -> int:
    """Return the index of the first block that a query at this position reaches. It equals attention.cpu.num_blocks_before."""
    return 0 if window is None else max(position - window + 1, 0) // block_size
