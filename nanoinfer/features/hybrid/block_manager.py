"""The block manager of models whose layers keep less than every token: windows, states, or both.

- Windows: a sequence has a table for each KV group, with blocks of the same pool (`kv_groups` in sizes.py). A
  group with a window keeps the blocks that the next query can still reach, and frees the others while the sequence runs. Their
  places in the table are NO_BLOCK. A prefix hit needs the blocks of each group that the first query after it reaches.

      tokens      | a a a a | b b b b | c c c c | d d     |     block_size 4, the next query is at position 14
      no window   |    7    |    2    |    9    |    4    |     it reaches every token
      window 6    |   -1    |   -1    |    8    |    5    |     it reaches tokens 9 to 14

- States have state slots (state_slots.py). tables.py has what a sequence gets in addition to Sequence.block_table.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike

from nanoinfer.features.hybrid.prefix_index import CacheGroup, HybridIndex, first_reached, tables_in
from nanoinfer.features.hybrid.sizes import most_blocks
from nanoinfer.features.hybrid.state_slots import WINDOW, StateSlots
from nanoinfer.features.hybrid.tables import NO_BLOCK, tables_of
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import NOBODY, SchedulingObserver
from nanoinfer.scheduling.pool import Pool
from nanoinfer.scheduling.prefix_index import Prefix
from nanoinfer.scheduling.sequence import Sequence


class HybridBlockManager(BlockManager):
    """Owns the tables of all KV groups and the state slots of each sequence."""

    acts_each_step = True
    index: HybridIndex

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: SchedulingObserver = NOBODY,
        windows: ListLike[int | None] = (None,),  # of each KV group, in tokens. None: every token is kept
        chunk_size: int = 1,  # the most tokens of a sequence in a step, for which a window's blocks must have room as well
        num_state_slots: int = 0,  # 0: no layer keeps a state
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching, observer)
        self.windows, self._chunk_size, self._has_windows = windows, chunk_size, any(windows)
        groups = [CacheGroup(window, self.blocks) for window in windows]
        if num_state_slots:
            groups.append(CacheGroup(WINDOW, Pool(num_state_slots)))
        self.index = HybridIndex(groups, block_size)
        self.state_slots = StateSlots(self.index) if num_state_slots else None

    def num_blocks_for(self, num_tokens: int) -> int:
        return most_blocks(num_tokens, self.windows, self.block_size, self._chunk_size)

    def num_blocks_for_forks(self, num_forks: int, num_shared_tokens: int, num_tokens: int) -> int:
        # windows leave shared blocks
        return super().num_blocks_for_forks(num_forks, 0 if self._has_windows else num_shared_tokens, num_tokens)

    def num_held_blocks(self, seq: Sequence) -> int:
        return len(self._held(seq))

    def tables(self, seq: Sequence) -> list[list[int]]:
        """Return the block tables of a sequence, in the order of the KV groups."""
        if len(self.windows) == 1:
            return [seq.block_table]
        further = tables_of(seq).block_tables
        while len(further) < len(self.windows) - 1:
            further.append([])
        return [seq.block_table, *further]

    # ---- queries

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:
        """Return the longest prefix that all groups can serve. Its pairs have the blocks of the first group."""
        return self.index.match(token_ids, cache_salt) if self.enable_prefix_caching else []

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:
        if self.state_slots is not None and not self.state_slots.pool.num_free:
            return False
        blocks = self._blocks_of(prefix)
        num_revived = sum(map(self.blocks.reusable.__contains__, blocks))
        num_needed = max(self.num_blocks_for(num_tokens) - len(blocks), 0) + num_revived
        return num_needed + num_kept_free <= self.num_free_blocks

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        if self.state_slots is not None and not self.state_slots.can_allocate(seq, num_new_tokens):
            return False
        first, end = seq.num_computed_tokens // self.block_size, seq.num_computed_tokens + num_new_tokens
        num_missing, ref_counts = 0, self.blocks.ref_counts
        for table in self.tables(seq):
            num_missing += max(-(-end // self.block_size) - len(table), 0)
            for block in table[first:]:
                num_missing += ref_counts[block] > 1
        return num_missing <= self.num_free_blocks

    def next_slots(self, sequences: ListLike[Sequence]) -> list[bool] | None:
        return None if self._has_windows or self.state_slots is not None else super().next_slots(sequences)

    def num_freed_blocks(self, seq: Sequence, prefix: Prefix) -> int:
        return sum(self.blocks.ref_counts[block] == 1 for block in set(self._held(seq)).difference(self._blocks_of(prefix)))

    def named_tables(self, seq: Sequence) -> list[tuple[list[int], str]]:
        if not self._has_windows:
            return super().named_tables(seq)
        return [(table, f"{seq.sequence_id} in KV group {group}") for group, table in enumerate(self.tables(seq))]

    # ---- changes

    def start(self, seq: Sequence, prefix: Prefix) -> None:
        seq.prefix_keys = [key for key, _ in prefix]
        for group, (table, ids) in enumerate(zip(self.tables(seq), tables_in(prefix), strict=False)):
            table += ids
            self.observer.blocks_changed("shared", seq, table, group)
        self.blocks.hold(self._blocks_of(prefix))
        if self.state_slots is not None and prefix:
            self.state_slots.share(tables_in(prefix)[-1][-1], seq)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        copies, tables, end = [], self.tables(seq), seq.num_computed_tokens + num_new_tokens
        for table in tables:
            for index in range(seq.num_computed_tokens // self.block_size, len(table)):
                if self.blocks.ref_counts[table[index]] > 1:
                    shared, table[index] = table[index], self._take()
                    self.blocks.drop([shared])
                    copies.append((shared, table[index]))
                    self.observer.block_copied(seq, shared, table[index])
        for group, table in enumerate(tables):
            num_before = len(table)
            while len(table) * self.block_size < end:
                table.append(self._take())
            self.observer.blocks_changed("allocated", seq, table[num_before:], group)
        if self.state_slots is not None:
            self.state_slots.allocate(seq, num_new_tokens, keeps=self.enable_prefix_caching and seq.is_answered)
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks that the first num_tokens fill to the prefix cache, and free those that no later query reaches."""
        num_cached = len(seq.prefix_keys)
        super().cache_finished_blocks(seq, num_tokens)
        num_full, (_, *further) = len(seq.prefix_keys), self.tables(seq)
        if further and num_full > num_cached:
            end = num_full * self.block_size
            full = [*self.index.further(seq.prefix_keys[:num_cached], seq.token_ids, end, seq.cache_salt)]
            for group, table in enumerate(further, 1):
                cached = self.index.enter(full, table[num_cached:num_full], group)
                self.observer.blocks_changed("cached", seq, cached, group)
        if self._has_windows:
            self._release(seq, num_tokens)
        if self.state_slots is not None:
            self.state_slots.cache_finished(seq, num_tokens)

    def forget_cached(self, seq: Sequence) -> None:
        for key in seq.prefix_keys:  # also those of blocks that the windows have left
            for group in self.index.groups[: len(self.windows)]:
                if key in group.ids:
                    self.evict(group.ids[key])

    def reset_prefix_cache(self) -> None:
        for group in self.index.groups[: len(self.windows)]:
            for block in list(group.ids.values()):
                self.evict(block)

    def evict(self, block: int) -> None:
        """Remove a cached block from the prefix cache, with the state at its end, but not from the sequences that hold it."""
        key = self.index.keys[self.blocks.contents[block]]
        super().evict(block)
        if self.state_slots is not None:
            self.state_slots.forget(key)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for table, shared in zip(self.tables(child), self.tables(parent), strict=True):
            table += shared
        child.prefix_keys, held = list(parent.prefix_keys), self._held(child)
        self.blocks.hold(held)
        self.observer.blocks_forked(parent, child, held)
        if self.state_slots is not None:
            self.state_slots.fork(parent, child)

    def free(self, seq: Sequence) -> None:
        tables = self.tables(seq)
        self.observer.blocks_changed("freed", seq, self._held(seq))
        self.blocks.drop(block for blocks in zip(*map(reversed, tables), strict=True) for block in blocks if block != NO_BLOCK)
        for table in tables:
            table.clear()
        seq.prefix_keys.clear()
        if self.state_slots is not None:
            self.state_slots.free(seq)

    # ---- inside

    def _blocks_of(self, prefix: Prefix) -> list[int]:
        """Return the blocks of a prefix, group by group."""
        return [block for table in tables_in(prefix)[: len(self.windows)] for block in table if block != NO_BLOCK]

    def _held(self, seq: Sequence) -> list[int]:
        return [block for table in self.tables(seq) for block in table if block != NO_BLOCK]

    def _release(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks that no query after the first num_tokens reaches."""
        released = []
        for table, window in zip(self.tables(seq), self.windows, strict=True):
            first = index = first_reached(num_tokens, window, self.block_size)
            while index > 0 and table[index - 1] != NO_BLOCK:
                index -= 1
            released += table[index:first]
            table[index:first] = [NO_BLOCK] * (first - index)
        if released:
            self.blocks.drop(released)
            self.observer.blocks_changed("released", seq, released)


def with_groups(own: type[BlockManager], *stores: type[HybridBlockManager]) -> Callable[..., HybridBlockManager]:
    """Return a class that does for several groups, and with a store, what a user's class overrides of BlockManager."""
    return type(own.__name__, (*stores, *([] if own is BlockManager else [own]), HybridBlockManager), {})
