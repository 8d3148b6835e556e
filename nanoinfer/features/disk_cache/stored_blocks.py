"""The second tier of a prefix index: a store keeps the blocks that leave the memory until a prompt begins with them again.

A BlockManager calls it. It knows keys and block ids. The store, which is a folder of files
(features/disk_cache/block_files.py), has the contents of the blocks.

    memory    [ the cat sat on | the mat and it ]                  the first blocks of a prompt are found here
    store                                       [ was warm and ]   and the next block here, which is read into a free block

A key contains the store's fingerprint (prefix_index.py), so every process that would compute the same block has the same key.
An entry is a key and the number of a cache group: each KV group has its own block, and only some blocks end with a state.

Other sequences wait while a step reads. So while sequences run, a step reads no more than as many tokens as it may compute.
The sequence whose blocks were read starts in a later step, and finds them in memory.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from nanoinfer.scheduling.pool import NO_BLOCK
from nanoinfer.scheduling.prefix_index import IN_STORE, Prefix, PrefixIndex

Entry = tuple[bytes, int]  # a key, and the number of a cache group


class BlockStore(Protocol):
    """Keeps the contents of blocks and states.

    Attributes:
        fingerprint: 32 bytes, which differ if the same tokens would have other keys and values.
        max_tokens_per_step: the number of tokens after which a step stops reading, while sequences run.
        is_open: whether the store may be used: until close(), and not in a forked process.
        counts: counters for the metrics. external_prefix_cache_hits is in tokens.
    """

    fingerprint: bytes
    max_tokens_per_step: int
    counts: dict[str, int]

    @property
    def is_open(self) -> bool: ...
    def max_entries(self, group: int) -> int: ...  # the most entries of a cache group that fit
    def has(self, entry: Entry) -> bool: ...
    def find(self, entry: Entry) -> Any | None: ...  # the content as it was kept, or None
    def fill(self, group: int, block: int, content: Any) -> None: ...  # writes the content into a block, or into a state slot
    def touch(self, entries: Iterable[Entry]) -> None: ...  # marks the entries as used, the last entry most recently
    def keep(self, entry: Entry, block: int, *, wait: bool = False) -> None: ...  # unless `wait`, only if the store is idle
    def discard(self, entry: Entry) -> None: ...
    def close(self) -> None: ...  # writes what is still to be written


class StoredBlocks:
    """Reads blocks from a store for a block manager, and keeps blocks there."""

    def __init__(self, store: BlockStore, index: PrefixIndex) -> None:
        self.store, self._index = store, index
        self.num_tokens_read = 0  # in the current step
        self._untouched: set[tuple[int, int]] = set()  # (group, id) pairs read for a sequence that has not started
        # The arguments hold no reference to the manager, so this also runs when an LLM is dropped or its process ends.
        self.keep_all = weakref.finalize(self, _keep_all, store, index)

    @property
    def is_busy(self) -> bool:
        """Whether this step has read as many tokens as it may while sequences run."""
        return self.num_tokens_read >= self.store.max_tokens_per_step

    def read(
        self, prefix: Prefix, token_ids: list[int], salt: str | None, take: Callable[[int], int], *, others_run: bool
    ) -> None:
        """Read, in order, the blocks of a prefix that only the store has, until one is missing or this step is_busy.

        take: returns a free block, or a free state slot, of the given cache group.
        """
        groups = self._index.groups
        # Hold all blocks until the end, so that none is taken for another.
        held = [(i, group, table[i]) for i in range(len(prefix)) for group, table in enumerate(prefix.tables) if table[i] >= 0]
        for _, group, block in held:
            groups[group].pool.hold([block])
        for i, (content, key) in enumerate(self._index.further([], token_ids, len(prefix) * self._index.block_size, salt)):
            missing = [group for group, table in enumerate(prefix.tables) if table[i] == IN_STORE]
            if missing and others_run and self.is_busy:
                break
            found = [self.store.find((key, group)) for group in missing]
            if any(kept is None for kept in found):
                break
            for group, kept in zip(missing, found, strict=True):
                block = take(group)
                self.store.fill(group, block, kept)
                self._index.enter([(content, key)], group, [block])
                self._untouched.add((group, block))
                held.append((i, group, block))
            self.num_tokens_read += self._index.block_size if missing else 0
            self.store.counts["external_prefix_cache_hits"] += self._index.block_size if missing else 0
        for _, group, block in sorted(held, reverse=True):  # as in free(), the start of a prompt stays cached longest
            groups[group].pool.drop([block])

    def touch(self, prefix: Prefix) -> None:
        """Mark a sequence's entries as used when it starts: once, although several steps may have read them."""
        used = {(group, block) for group, table in enumerate(prefix.tables) for block in table if block != NO_BLOCK}
        if not self._untouched.isdisjoint(used):
            self.store.touch((key, group) for key in reversed(prefix.keys) for group in range(len(self._index.groups)))
            self._untouched -= used

    def keep(self, key: bytes) -> None:
        """Keep the blocks and the state with this key, before a block or the state leaves the memory."""
        for number, group in enumerate(self._index.groups if self.store.is_open else ()):
            if key in group.ids:
                self.store.keep((key, number), group.ids[key])

    def discard(self, key: bytes) -> None:
        for group in range(len(self._index.groups) if self.store.is_open else 0):
            self.store.discard((key, group))


def _keep_all(store: BlockStore, index: PrefixIndex) -> None:
    """Keep the free cached blocks, or as many of the most recently used as fit, and close the store."""
    if store.is_open:
        pools = {group.pool: number for number, group in enumerate(index.groups)}
        for pool, number in pools.items():
            for block in [*pool.reusable][-store.max_entries(number) :]:
                content = pool.contents[block]
                if key := index.keys.get(content):
                    entry = key, pool.groups[block]
                    store.keep(entry, block, wait=True)
                    if pool.contents[block] is not content:  # while the process ends, an engine's thread may still take blocks
                        store.discard(entry)
        store.close()
