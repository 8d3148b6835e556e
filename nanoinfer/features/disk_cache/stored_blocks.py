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
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoinfer.features.hybrid.block_manager import HybridBlockManager
from nanoinfer.features.hybrid.prefix_index import IN_STORE, HybridIndex, HybridPrefix, tables_in
from nanoinfer.features.hybrid.tables import NO_BLOCK
from nanoinfer.scheduling.prefix_index import Prefix
from nanoinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanoinfer.features.disk_cache.block_files import BlockFiles

Entry = tuple[bytes, int]  # a key, and the number of a cache group


class StoredBlockManager(HybridBlockManager):
    """A block manager with a store. Its methods extend those of the class that follows it, which may be a user's."""

    def __init__(self, *args: Any, store: "BlockFiles") -> None:
        """args: the arguments of HybridBlockManager."""
        super().__init__(*args)
        self.store, self.counts, self.index.fingerprint = store, store.counts, store.fingerprint
        self.num_tokens_read = 0  # in the current step
        self._untouched: set[tuple[int, int]] = set()  # (group, id) pairs read for a sequence that has not started
        if self.state_slots is not None:
            self.state_slots.before_drop = partial(_keep, store, self.index)
        # The arguments hold no reference to the manager, so this also runs when an LLM is dropped or its process ends.
        self._keep_all = weakref.finalize(self, _keep_all, store, self.index)

    def choose_evicted(self, candidates: Collection[int]) -> int:
        evicted = super().choose_evicted(candidates)
        if evicted in candidates:  # the caller refuses any other block
            _keep(self.store, self.index, self.index.keys[self.blocks.contents[evicted]])
        return evicted

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:
        """Return the longest prefix, as without a store. Blocks that only the store has are read if all tokens have room."""
        prefix = super().match_prefix(token_ids, cache_salt)
        if self.enable_prefix_caching and self.store.is_open and self.can_start(len(token_ids), prefix):
            self._read(self.index.match(token_ids, cache_salt, self.store.has), token_ids, cache_salt)
            prefix = super().match_prefix(token_ids, cache_salt)
        return prefix

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:
        if self._must_wait:
            return False  # the store may hold more, which the next step reads
        return super().can_start(num_tokens, prefix, num_kept_free=num_kept_free)

    def start(self, seq: Sequence, prefix: Prefix) -> None:
        super().start(seq, prefix)
        # Mark the entries as used: once, although several steps may have read them.
        used = {(group, block) for group, table in enumerate(tables_in(prefix)) for block in table if block != NO_BLOCK}
        if not self._untouched.isdisjoint(used):
            self.store.touch((key, group) for key, _ in reversed(prefix) for group in range(len(self.index.groups)))
            self._untouched -= used

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        super().cache_finished_blocks(seq, num_tokens)
        self.num_tokens_read = 0  # the step was launched

    def forget_cached(self, seq: Sequence) -> None:
        super().forget_cached(seq)
        for key in seq.prefix_keys if self.store.is_open else ():
            for group in range(len(self.index.groups)):
                self.store.discard((key, group))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, and stop using the store: its fingerprint does not describe new weights, which may follow."""
        super().reset_prefix_cache()
        self.store.close()

    def close(self) -> None:
        """Write the prefix cache to the store before the engine ends."""
        self._keep_all()

    # ---- inside

    @property
    def _must_wait(self) -> bool:
        """Whether sequences run, and this step has read as many tokens as it may meanwhile."""
        return self.num_free_blocks < self.num_blocks and self.num_tokens_read >= self.store.max_tokens_per_step

    def _read(self, prefix: HybridPrefix, token_ids: list[int], salt: str | None) -> None:
        """Read, in order, the blocks of a prefix that only the store has, until one is missing or the others must not wait."""
        groups, others_run = self.index.groups, self.num_free_blocks < self.num_blocks
        # Hold all blocks until the end, so that none is taken for another.
        held = [(i, group, table[i]) for i in range(len(prefix)) for group, table in enumerate(prefix.tables) if table[i] >= 0]
        for _, group, block in held:
            groups[group].pool.hold([block])
        for i, (content, key) in enumerate(self.index.further([], token_ids, len(prefix) * self.block_size, salt)):
            missing = [group for group, table in enumerate(prefix.tables) if table[i] == IN_STORE]
            if missing and others_run and self.num_tokens_read >= self.store.max_tokens_per_step:
                break
            found = [kept for group in missing if (kept := self.store.find((key, group))) is not None]
            if len(found) < len(missing):
                break
            for group, kept in zip(missing, found, strict=True):
                in_slot = self.state_slots if group == len(self.windows) else None
                block = self._take() if in_slot is None else in_slot.take()
                self.store.fill(group, block, kept)
                self.index.enter([(content, key)], [block], group)
                self._untouched.add((group, block))
                held.append((i, group, block))
            self.num_tokens_read += self.block_size if missing else 0
            self.store.counts["external_prefix_cache_hits"] += self.block_size if missing else 0
        for _, group, block in sorted(held, reverse=True):  # as in free(), the start of a prompt stays cached longest
            groups[group].pool.drop([block])


def _keep(store: "BlockFiles", index: HybridIndex, key: bytes) -> None:
    """Keep the blocks and the state with this key, before a block or the state leaves the memory."""
    for number, group in enumerate(index.groups if store.is_open else ()):
        if key in group.ids:
            store.keep((key, number), group.ids[key])


def _keep_all(store: "BlockFiles", index: HybridIndex) -> None:
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
