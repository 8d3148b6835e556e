"""The second tier of a prefix index: a store keeps the blocks that leave the memory until a prompt begins with them again.

A StoredBlockManager does what another block manager does, and reads and keeps blocks. It knows keys and block ids. The store,
which is a folder of files (block_files.py), has the contents of the blocks.

    memory    [ the cat sat on | the mat and it ]                  the first blocks of a prompt are found here
    store                                       [ was warm and ]   and the next block here, which is read into a free block

The key before the first block is the digest of the store's fingerprint and the salt, so every process that would compute the
same block has the same key. An entry is a key and the number of a cache group: each KV group has its own block, and only some
blocks end with a state.

Other sequences wait while a step reads. So while sequences run, a step reads no more than as many tokens as it may compute.
The sequence whose blocks were read starts in a later step, and finds them in memory.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from nanoinfer.engine.observer import Observer
from nanoinfer.features.hybrid.block_manager import HybridBlockManager
from nanoinfer.features.hybrid.prefix_index import IN_STORE, HybridIndex, HybridPrefix, tables_in
from nanoinfer.features.hybrid.tables import NO_BLOCK
from nanoinfer.outputs import Counter, Metric
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.prefix_index import Prefix
from nanoinfer.scheduling.sequence import Sequence

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

    def __init__(self, store: BlockStore, index: HybridIndex) -> None:
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
        self, prefix: HybridPrefix, token_ids: list[int], salt: str | None, take: Callable[[int], int], *, others_run: bool
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
                self._index.enter([(content, key)], [block], group)
                self._untouched.add((group, block))
                held.append((i, group, block))
            self.num_tokens_read += self._index.block_size if missing else 0
            self.store.counts["external_prefix_cache_hits"] += self._index.block_size if missing else 0
        for _, group, block in sorted(held, reverse=True):  # as in free(), the start of a prompt stays cached longest
            groups[group].pool.drop([block])

    def touch(self, prefix: Prefix) -> None:
        """Mark a sequence's entries as used when it starts: once, although several steps may have read them."""
        used = {(group, block) for group, table in enumerate(tables_in(prefix)) for block in table if block != NO_BLOCK}
        if not self._untouched.isdisjoint(used):
            self.store.touch((key, group) for key, _ in reversed(prefix) for group in range(len(self._index.groups)))
            self._untouched -= used

    def keep(self, key: bytes) -> None:
        """Keep the blocks and the state with this key, before a block or the state leaves the memory."""
        for number, group in enumerate(self._index.groups if self.store.is_open else ()):
            if key in group.ids:
                self.store.keep((key, number), group.ids[key])

    def discard(self, key: bytes) -> None:
        for group in range(len(self._index.groups) if self.store.is_open else 0):
            self.store.discard((key, group))


class StoredBlockManager(HybridBlockManager):
    """A block manager with a store. Its methods extend those of the class that follows it, which may be a user's.

    Attributes:
        stored: moves blocks between memory and the store.
    """

    def __init__(self, *args: Any, store: BlockStore) -> None:
        """args: the arguments of HybridBlockManager."""
        super().__init__(*args)
        self.index.fingerprint = store.fingerprint
        self.stored = StoredBlocks(store, self.index)
        if self.state_slots is not None:
            self.state_slots.before_drop = self.stored.keep

    @property
    def _others_run(self) -> bool:
        return self.num_free_blocks < self.num_blocks

    def choose_evicted(self, candidates: Collection[int]) -> int:
        evicted = super().choose_evicted(candidates)
        self.stored.keep(self.index.keys[self.blocks.contents[evicted]])
        return evicted

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:
        """Return the longest prefix, as without a store. Blocks that only the store has are read if all tokens have room."""
        prefix = super().match_prefix(token_ids, cache_salt)
        if self.enable_prefix_caching and self.stored.store.is_open and self.can_start(len(token_ids), prefix):
            wanted = self.index.match(token_ids, cache_salt, self.stored.store.has)
            self.stored.read(wanted, token_ids, cache_salt, self._take_for, others_run=self._others_run)
            prefix = super().match_prefix(token_ids, cache_salt)
        return prefix

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:
        if self._others_run and self.stored.is_busy:
            return False  # the store may hold more, which the next step reads
        return super().can_start(num_tokens, prefix, num_kept_free=num_kept_free)

    def start(self, seq: Sequence, prefix: Prefix) -> None:
        super().start(seq, prefix)
        self.stored.touch(prefix)

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        super().cache_finished_blocks(seq, num_tokens)
        self.stored.num_tokens_read = 0  # the step was launched

    def forget_cached(self, seq: Sequence) -> None:
        super().forget_cached(seq)
        for key in seq.prefix_keys:
            self.stored.discard(key)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, and stop using the store: its fingerprint does not describe new weights, which may follow."""
        super().reset_prefix_cache()
        self.stored.store.close()

    def close(self) -> None:
        """Write the prefix cache to the store before the engine ends."""
        self.stored.keep_all()

    def _take_for(self, group: int) -> int:
        """Take a block, or a state slot, into which the store's content is read."""
        return self._take() if self.state_slots is None or group < len(self.windows) else self.state_slots.take()


def with_store(own: type[BlockManager]) -> type[StoredBlockManager]:
    """Return a class that does with a store what a user's class overrides of BlockManager."""
    bases = [StoredBlockManager, *([] if own is BlockManager else [own]), HybridBlockManager]
    made: type[StoredBlockManager] = type(own.__name__, tuple(bases), {})
    return made


class StoreMetrics(Observer):
    """Adds the counters of a store to the metrics."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def metrics_read(self, engine: object, metrics: list[Metric]) -> None:
        metrics += [Counter(f"vllm:{name}", count) for name, count in self._store.counts.items()]


def _keep_all(store: BlockStore, index: HybridIndex) -> None:
    """Keep the free cached blocks, or as many of the most recently used as fit, and close the store."""
    if store.is_open:
        pools = {group.pool: number for number, group in enumerate(index.groups)}
        for pool, number in pools.items():
            for block in [*pool.reusable][-store.max_entries(number) :]:
                content = pool.contents[block]
                key = index.keys.get(content, b"")
                if (group := index.group_of(key, pool, block)) >= 0:
                    entry = key, group
                    store.keep(entry, block, wait=True)
                    if pool.contents[block] is not content:  # while the process ends, an engine's thread may still take blocks
                        store.discard(entry)
        store.close()
