"""Decide which cache blocks belong to which sequence. This is pure bookkeeping: block ids and counts, no tensors.

A sequence's tokens are stored in blocks of `block_size` slots, and its block table lists these blocks in order, so token i has
slot `block_table[i // block_size] * block_size + i % block_size`:

- Reference counts (pool.py): after a prefix hit or a fork, a block is in several block tables, and it is free at count zero.
- Prefix caching (prefix_index.py): a prompt begins with the blocks that hold its start. Freed blocks keep their content until
  they are needed, the least recently used first.
- Copy on write: a fork shares all blocks, including the partly filled last block. Before a sequence writes into a shared block,
  it gets its own copy, which the executor makes before the forward pass.

    tokens   [ the cat sat on | the mat and     ]         block_size 4
    table    [       7        |        2        ]         7 is full and has a key, 2 is being filled

Usually every layer keeps every token, and a sequence has a single table. A CacheLayout says what else a model has:

- Windows: a sequence has a table for each KV group, with blocks of the same pool (`kv_groups` in attention/cache_sizes.py). A
  group with a window keeps the blocks that the next query can still reach, and frees the others while the sequence runs. Their
  places in the table are NO_BLOCK. A prefix hit needs the blocks of each group that the first query after it reaches.

      tokens      | a a a a | b b b b | c c c c | d d     |     block_size 4, the next query is at position 14
      no window   |    7    |    2    |    9    |    4    |     it reaches every token
      window 6    |   -1    |   -1    |    8    |    5    |     it reaches tokens 9 to 14

- States have state slots (state_slots.py), and a store keeps the blocks that leave the memory (stored_blocks.py).

A subclass may override choose_evicted, which decides what the prefix cache forgets, and extend start and evict to count hits:
LLM(block_manager_cls=...). `explain` says who holds a block, and why.

Source: PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from nanoinfer.errors import InvalidValueError
from nanoinfer.scheduling.observer import NOBODY, SchedulingObserver
from nanoinfer.scheduling.pool import NO_BLOCK, Pool
from nanoinfer.scheduling.prefix_index import CacheGroup, Prefix, PrefixIndex, first_reached
from nanoinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanoinfer.features.disk_cache.stored_blocks import BlockStore


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the layers of a model keep.

    Attributes:
        windows: the window of each KV group, in tokens. None: every token is kept.
        chunk_size: the most tokens of a sequence in a step, for which a window's blocks must have room as well.
        num_state_slots: the number of slots for states. 0: no layer keeps a state.
    """

    windows: tuple[int | None, ...] = (None,)
    chunk_size: int = 1
    num_state_slots: int = 0


class BlockManager:
    """Owns block ids 0 .. num_blocks - 1, every Sequence.block_table and every Sequence.prefix_keys.

    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> seq = Sequence("r0", [5, 6, 7], SamplingParams(), seed=0, max_num_tokens=8)
    >>> manager.allocate(seq, 3), seq.block_table, manager.num_free_blocks
    ([], [0, 1], 2)

    Attributes:
        blocks: the pool that counts references to blocks.
        index: the prefix cache.
        state_slots: assigns the state slots. None: the model keeps no states.
        stored: moves blocks between memory and a store. None: there is no store.
        acts_each_step: whether cache_finished_blocks has something to do when no block was filled.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        observer: SchedulingObserver = NOBODY,
        layout: CacheLayout = CacheLayout(),
        store: "BlockStore | None" = None,
    ) -> None:
        """Subclasses must pass all arguments on. store: receives blocks that leave the memory. None: they are dropped."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.observer = observer
        self.windows, self._layout, self._has_windows = layout.windows, layout, layout.windows != (None,)
        self.acts_each_step = self._has_windows or layout.num_state_slots > 0 or store is not None
        self.blocks = Pool(num_blocks)
        groups = [CacheGroup(window, self.blocks) for window in layout.windows]
        self.state_slots = self.stored = None
        if layout.num_state_slots:
            from nanoinfer.features.hybrid.state_slots import WINDOW, StateSlots

            groups.append(CacheGroup(WINDOW, Pool(layout.num_state_slots)))
        self.index = PrefixIndex(groups, block_size, b"" if store is None else store.fingerprint)
        if store is not None:
            from nanoinfer.features.disk_cache.stored_blocks import StoredBlocks

            self.stored = StoredBlocks(store, self.index)
        if layout.num_state_slots:
            self.state_slots = StateSlots(self.index, self.stored)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in no block table. Some of them stay in the prefix cache until they are taken."""
        return self.blocks.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds at a time, while it grows to num_tokens."""
        if self._has_windows:
            return most_blocks(num_tokens, self.windows, self.block_size, self._layout.chunk_size)
        return -(-num_tokens // self.block_size)

    def num_blocks_for_forks(self, num_forks: int, num_shared_tokens: int, num_tokens: int) -> int:
        """Return the most blocks that forks need to grow to num_tokens each, when they share the first num_shared_tokens."""
        num_shared = 0 if self._has_windows else num_shared_tokens // self.block_size  # windows leave shared blocks
        return num_shared + num_forks * (self.num_blocks_for(num_tokens) - num_shared)

    def num_held_blocks(self, seq: Sequence) -> int:
        return len(self._held(seq)) if self._has_windows else len(seq.block_table)

    def tables(self, seq: Sequence) -> tuple[list[int], ...]:
        """Return the block tables of a sequence, in the order of the KV groups."""
        if not self._has_windows:
            return (seq.block_table,)
        if len(seq.more_block_tables) < len(self.windows) - 1:
            seq.more_block_tables = [[] for _ in self.windows[1:]]
        return (seq.block_table, *seq.more_block_tables)

    # ---- for subclasses to override

    def choose_evicted(self, candidates: Collection[int]) -> int:
        """Choose the cached block that is taken next when no free block is empty. Its content leaves the prefix cache.

        candidates: the free cached blocks, at least one, the least recently used first.
        """
        return next(iter(candidates))

    # ---- queries

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:
        """Return the longest chain of full cached blocks that hold the start of token_ids. Its len() is the number of blocks.

        With a store, blocks that only the store has are read, if there is room for all tokens.
        """
        if not self.enable_prefix_caching:
            return Prefix()
        prefix = self.index.match(token_ids, cache_salt)
        if self.stored is not None and self.stored.store.is_open and self.can_start(len(token_ids), prefix):
            wanted = self.index.match(token_ids, cache_salt, self.stored.store.has)
            self.stored.read(wanted, token_ids, cache_salt, self._take_for, others_run=self._others_run)
            prefix = self.index.match(token_ids, cache_salt)
        return prefix

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:
        """Return whether all tokens of a waiting sequence with this prefix fit, and num_kept_free blocks more."""
        if self.state_slots is not None and not self.state_slots.pool.num_free:
            return False
        if self.stored is not None and self._others_run and self.stored.is_busy:
            return False  # the store may hold more, which the next step reads
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
                num_missing += ref_counts[block] > 1  # shared, so it will be copied
        return num_missing <= self.num_free_blocks

    def next_slots(self, sequences: ListLike[Sequence]) -> list[bool] | None:
        """Return for each sequence whether the slot of its single new token is in a block that it has alone.

        `allocate` changes nothing for such a sequence, and takes one block for each of the others. None: a sequence has more
        new tokens, the model has windows or states, or the free blocks may not suffice.
        """
        if self._has_windows or self.state_slots is not None:
            return None
        block_size, ref_counts = self.block_size, self.blocks.ref_counts
        found: list[bool] = []
        for seq in sequences:
            start, table = seq.num_computed_tokens, seq.block_table
            if seq.num_tokens != start + 1:
                return None
            found += (start < len(table) * block_size and ref_counts[table[start // block_size]] == 1,)
        return found if found.count(False) <= self.num_free_blocks else None

    def num_freed_blocks(self, seq: Sequence, prefix: Prefix) -> int:
        """Return how many blocks would be free if the sequence ended, not counting those of another sequence's prefix."""
        return sum(self.blocks.ref_counts[block] == 1 for block in set(self._held(seq)).difference(self._blocks_of(prefix)))

    def explain(self, block: int, sequences: Iterable[Sequence]) -> str:
        """Describe a block's holders and its place in the prefix cache: "block 1: 1 reference; tokens 2 to 3 of r0".

        sequences: the sequences whose tables are searched, such as llm.engine.scheduler.running.
        """
        said = [f"{self.blocks.ref_counts[block]} reference{'s' * (self.blocks.ref_counts[block] != 1)}"]
        for seq in sequences:
            for group, table in enumerate(self.tables(seq)):
                if block in table:
                    first = table.index(block) * self.block_size
                    of_group = f" in KV group {group}" if self._has_windows else ""
                    said.append(f"tokens {first} to {first + self.block_size - 1} of {seq.sequence_id}{of_group}")
        if self.blocks.contents[block]:
            said.append(f"in the prefix cache with key {self.index.keys[self.blocks.contents[block]].hex()[:8]}")
        if block in self.blocks.reusable:
            said.append(f"free, and reused after {list(self.blocks.reusable).index(block)} others, when no block is empty")
        return f"block {block}: {'; '.join(said)}"

    # ---- changes

    def start(self, seq: Sequence, prefix: Prefix) -> None:
        """Give a waiting sequence the cached blocks of its prefix, as match_prefix has just returned them."""
        assert not seq.block_table, "a sequence starts with empty block tables"
        seq.prefix_keys = list(prefix.keys)
        for group, (table, ids) in enumerate(zip(self.tables(seq), prefix.tables, strict=False)):
            table += ids
            self.observer.blocks_changed("shared", seq, table, group)
        self.blocks.hold(self._blocks_of(prefix))
        if self.state_slots is not None and prefix:
            self.state_slots.share(prefix.tables[-1][-1], seq)
        if self.stored is not None:
            self.stored.touch(prefix)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks for the sequence's next tokens, which can_allocate has confirmed.

        Returns the (from, to) blocks to copy before these tokens are written.
        """
        copies, tables, end = [], self.tables(seq), seq.num_computed_tokens + num_new_tokens
        for table in tables:
            for index in range(seq.num_computed_tokens // self.block_size, len(table)):
                if self.blocks.ref_counts[table[index]] > 1:  # true for at most one block of a table, after a fork
                    shared, table[index] = table[index], self._take()
                    self.blocks.drop([shared])
                    copies.append((shared, table[index]))
                    self.observer.block_copied(seq, shared, table[index])
        for group, table in enumerate(tables):
            num_before = len(table)
            while len(table) * self.block_size < end:
                table.append(self._take())  # one by one, because a policy may raise
            self.observer.blocks_changed("allocated", seq, table[num_before:], group)
        if self.state_slots is not None:
            self.state_slots.allocate(seq, num_new_tokens, keeps=self.enable_prefix_caching and seq.is_answered)
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks that the sequence's first num_tokens fill, which must be computed, to the prefix cache.

        Blocks that no query after these tokens reaches are freed.
        """
        num_full = num_tokens // self.block_size if self.enable_prefix_caching and seq.is_answered else 0
        num_cached, cached = len(seq.prefix_keys), []
        if num_full > num_cached:
            full = [*self.index.further(seq.prefix_keys, seq.token_ids, num_full * self.block_size, seq.cache_salt)]
            seq.prefix_keys += [key for _, key in full]
            for group, table in enumerate(self.tables(seq)):
                # If another sequence filled a block with the same tokens first, its block stays in the cache.
                cached += self.index.enter(full, group, table[num_cached:num_full])
            self.observer.blocks_changed("cached", seq, cached)
        if self._has_windows:
            self._release(seq, num_tokens)
        if self.state_slots is not None:
            self.state_slots.cache_finished(seq, num_tokens)
        if self.stored is not None:
            self.stored.num_tokens_read = 0  # the step was launched

    def forget_cached(self, seq: Sequence) -> None:
        """Remove the blocks with the sequence's keys from the prefix cache, but not from sequences that share them."""
        for key in seq.prefix_keys:  # also those of blocks that the windows have left
            for group in self.index.groups[: len(self.windows)]:
                if key in group.ids:
                    self.evict(group.ids[key])
            if self.stored is not None:
                self.stored.discard(key)

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache, but not from the sequences that hold it, and stop using the store.

        New weights may follow, which the store's fingerprint does not describe.
        """
        for group in self.index.groups[: len(self.windows)]:
            for block in list(group.ids.values()):
                self.evict(block)
        if self.stored is not None:
            self.stored.store.close()

    def evict(self, block: int) -> None:
        """Remove a cached block from the prefix cache, with the state at its end, but not from the sequences that hold it."""
        key = self.index.keys[self.blocks.contents[block]]
        self.index.remove(key, self.blocks.groups[block])
        if self.state_slots is not None:
            self.state_slots.forget(key)
        self.observer.block_evicted(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of the parent's blocks with a child, whose tokens and num_computed_tokens the caller sets."""
        assert not child.block_table, "a fork starts with empty block tables"
        child.block_table, *child.more_block_tables = (list(table) for table in self.tables(parent))
        child.prefix_keys = list(parent.prefix_keys)
        held = self._held(child)
        self.blocks.hold(held)
        self.observer.blocks_forked(parent, child, held)
        if self.state_slots is not None:
            self.state_slots.fork(parent, child)

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks, the last first, so that the start of a prompt, which others may share, is kept."""
        tables = self.tables(seq)
        self.observer.blocks_changed("freed", seq, self._held(seq))
        self.blocks.drop(block for blocks in zip(*map(reversed, tables), strict=True) for block in blocks if block != NO_BLOCK)
        for table in tables:
            table.clear()
        seq.prefix_keys.clear()
        if self.state_slots is not None:
            self.state_slots.free(seq)

    def close(self) -> None:
        """Write the prefix cache to the store before the engine ends."""
        if self.stored is not None:
            self.stored.keep_all()

    # ---- inside

    @property
    def _others_run(self) -> bool:
        return self.num_free_blocks < self.num_blocks

    def _blocks_of(self, prefix: Prefix) -> list[int]:
        """Return the blocks of a prefix, group by group."""
        if not self._has_windows:
            return prefix.tables[0] if prefix else []
        return [block for table in prefix.tables[: len(self.windows)] for block in table if block != NO_BLOCK]

    def _held(self, seq: Sequence) -> list[int]:
        return [block for block in chain.from_iterable(self.tables(seq)) if block != NO_BLOCK]

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

    def _take(self) -> int:
        if not self.blocks.empty:
            evicted = self.choose_evicted(self.blocks.reusable.keys())
            assert evicted in self.blocks.reusable, "choose_evicted returns one of the candidates"
            if self.stored is not None:
                self.stored.keep(self.index.keys[self.blocks.contents[evicted]])
            self.evict(evicted)
        return self.blocks.take()

    def _take_for(self, group: int) -> int:
        """Take a block, or a state slot, into which the store's content is read."""
        return self._take() if self.state_slots is None or group < len(self.windows) else self.state_slots.take()


def most_blocks(num_tokens: int, windows: ListLike[int | None], block_size: int, chunk_size: int) -> int:
    """Return the most blocks that a sequence holds at a time, while it grows to num_tokens by at most chunk_size at a time.

    In a group with a window these are the blocks of the window and the chunk, plus one if they begin inside a block.

    >>> most_blocks(4000, [None, 512], block_size=64, chunk_size=256)
    76
    """
    num_for_all = -(-num_tokens // block_size)
    return sum(
        num_for_all if window is None else min(num_for_all, -(-(window + chunk_size) // block_size) + 1) for window in windows
    )


# On a CPU the cache takes at most this many bytes and at most half of the free memory, unless kv_cache_memory is set.
DEFAULT_CPU_MEMORY = 4 * 2**30


def most_that_fit(memory: int, block_bytes: int, state_bytes: int, max_num_seqs: int, longest: int) -> tuple[int, int]:
    """Return how many blocks and state slots fit into the memory, but at most what max_num_seqs sequences need.

    Args:
        memory: the bytes for the cache, of which states get at most half.
        block_bytes: the bytes of a block.
        state_bytes: the bytes of a state. 0: the model keeps no states.
        longest: the blocks that the longest sequence needs.

    Raises: InvalidValueError if no state fits.
    """
    num_state_slots = 0
    if state_bytes:  # two for each running sequence, one of them for a checkpoint
        num_state_slots = min(memory // 2 // state_bytes, 2 * max_num_seqs)
        if num_state_slots < 1:
            raise InvalidValueError(
                f"half of the cache's {memory} bytes must hold the state of a sequence, {state_bytes} bytes; raise "
                "kv_cache_memory"
            )
    return min((memory - num_state_slots * state_bytes) // block_bytes, max_num_seqs * longest), num_state_slots
