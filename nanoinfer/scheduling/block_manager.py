"""Decide which cache blocks belong to which sequence. This is pure bookkeeping: block ids and counts, no tensors.

- Reference counts (pool.py): after a prefix hit or a fork, a block is in several block tables, and it is free at count zero.
- Prefix caching (prefix_index.py): a prompt begins with the blocks that hold its start. Freed blocks keep their content until
  they are needed, the least recently used first.
- Copy on write: a fork shares all blocks, including the partly filled last block. Before a sequence writes into a shared block,
  it gets its own copy, which the executor makes before the forward pass.

A subclass may override choose_evicted, which decides what the prefix cache forgets, and extend start and evict to count hits:
LLM(block_manager_cls=...). Its __init__ must pass all arguments on, also further ones. `explain` says who holds a block, and
why. Subclasses for layers that keep less than every token, and for blocks that outlive the memory, are in features/hybrid and
features/disk_cache.

Source: PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as ListLike

from nanoinfer.scheduling.observer import NOBODY, SchedulingObserver
from nanoinfer.scheduling.pool import Pool
from nanoinfer.scheduling.prefix_index import Prefix, PrefixIndex
from nanoinfer.scheduling.sequence import Sequence


class BlockManager:
    """Owns block ids 0 .. num_blocks - 1, every Sequence.block_table and every Sequence.prefix_keys.

    A sequence's tokens are stored in blocks of `block_size` slots, and its block table lists these blocks in order, so token i
    has slot `block_table[i // block_size] * block_size + i % block_size`.

        tokens   [ the cat sat on | the mat and     ]         block_size 4
        table    [       7        |        2        ]         7 is full and has a key, 2 is being filled

    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> seq = Sequence("r0", [5, 6, 7], SamplingParams(), seed=0, max_num_tokens=8)
    >>> manager.allocate(seq, 3), seq.block_table, manager.num_free_blocks
    ([], [0, 1], 2)

    Attributes:
        blocks: the pool that counts references to blocks.
        index: the prefix cache.
        counts: what a subclass counts for the metrics, by the names of the counters.
        acts_each_step: whether cache_finished_blocks has something to do when no block was filled.
    """

    acts_each_step = False
    counts: Mapping[str, int] = {}

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, observer: SchedulingObserver = NOBODY
    ) -> None:
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.observer = observer
        self.blocks = Pool(num_blocks)
        self.index = PrefixIndex(self.blocks, block_size)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in no block table. Some of them stay in the prefix cache until they are taken."""
        return self.blocks.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence holds at a time, while it grows to num_tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_for_forks(self, num_forks: int, num_shared_tokens: int, num_tokens: int) -> int:
        """Return the most blocks that forks need to grow to num_tokens each, when they share the first num_shared_tokens."""
        num_shared = num_shared_tokens // self.block_size
        return num_shared + num_forks * (self.num_blocks_for(num_tokens) - num_shared)

    def num_held_blocks(self, seq: Sequence) -> int:
        return len(seq.block_table)

    # ---- for subclasses to override

    def choose_evicted(self, candidates: Collection[int]) -> int:
        """Choose the cached block that is taken next when no free block is empty. Its content leaves the prefix cache.

        candidates: the free cached blocks, at least one, the least recently used first.
        """
        return next(iter(candidates))

    # ---- queries

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:
        """Return the longest chain of full cached blocks that hold the start of token_ids, each block with its key."""
        keys = self.index.chain(token_ids, cache_salt) if self.enable_prefix_caching else []
        return [(key, self.index.ids[key]) for key in keys]

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:
        """Return whether all tokens of a waiting sequence with this prefix fit, and num_kept_free blocks more."""
        num_revived = sum(block in self.blocks.reusable for _, block in prefix)
        num_needed = self.num_blocks_for(num_tokens) - len(prefix) + num_revived
        return num_needed + num_kept_free <= self.num_free_blocks

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Return whether the sequence's next tokens fit. A block that they share with another sequence is copied."""
        first, end = seq.num_computed_tokens // self.block_size, seq.num_computed_tokens + num_new_tokens
        num_copied = [self.blocks.ref_counts[block] > 1 for block in seq.block_table[first:]].count(True)
        return max(-(-end // self.block_size) - len(seq.block_table), 0) + num_copied <= self.num_free_blocks

    def next_slots(self, sequences: ListLike[Sequence]) -> list[bool] | None:
        """Return for each sequence whether the slot of its single new token is in a block that it has alone.

        `allocate` changes nothing for such a sequence, and takes one block for each of the others. None: a sequence has more
        new tokens, or the free blocks may not suffice.
        """
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
        others = {block for _, block in prefix}
        return sum(self.blocks.ref_counts[block] == 1 for block in seq.block_table if block not in others)

    def explain(self, block: int, sequences: Iterable[Sequence]) -> str:
        """Describe a block's holders and its place in the prefix cache: "block 1: 1 reference; tokens 2 to 3 of r0".

        sequences: the sequences whose tables are searched, such as llm.engine.scheduler.running.
        """
        said = [f"{self.blocks.ref_counts[block]} reference{'s' * (self.blocks.ref_counts[block] != 1)}"]
        for seq in sequences:
            for table, name in self.named_tables(seq):
                if block in table:
                    first = table.index(block) * self.block_size
                    said.append(f"tokens {first} to {first + self.block_size - 1} of {name}")
        if self.blocks.contents[block]:
            said.append(f"in the prefix cache with key {self.index.keys[self.blocks.contents[block]].hex()[:8]}")
        if block in self.blocks.reusable:
            said.append(f"free, and reused after {list(self.blocks.reusable).index(block)} others, when no block is empty")
        return f"block {block}: {'; '.join(said)}"

    def named_tables(self, seq: Sequence) -> list[tuple[list[int], str]]:
        """Return the block tables of a sequence, each with a name for `explain`."""
        return [(seq.block_table, seq.sequence_id)]

    # ---- changes

    def start(self, seq: Sequence, prefix: Prefix) -> None:
        """Give a waiting sequence the cached blocks of its prefix, as match_prefix has just returned them."""
        seq.prefix_keys, seq.block_table = [key for key, _ in prefix], [block for _, block in prefix]
        self.blocks.hold(seq.block_table)
        self.observer.blocks_changed("shared", seq, seq.block_table)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks for the sequence's next tokens, which can_allocate has confirmed.

        Returns the (from, to) blocks to copy before these tokens are written.
        """
        copies, table, end = [], seq.block_table, seq.num_computed_tokens + num_new_tokens
        for index in range(seq.num_computed_tokens // self.block_size, len(table)):
            if self.blocks.ref_counts[table[index]] > 1:  # true for at most one block, after a fork
                shared, table[index] = table[index], self._take()
                self.blocks.drop([shared])
                copies.append((shared, table[index]))
                self.observer.block_copied(seq, shared, table[index])
        num_before = len(table)
        while len(table) * self.block_size < end:
            table.append(self._take())  # one by one, because a policy may raise
        self.observer.blocks_changed("allocated", seq, table[num_before:])
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks that the sequence's first num_tokens fill, which must be computed, to the prefix cache."""
        num_full = num_tokens // self.block_size if self.enable_prefix_caching and seq.is_answered else 0
        num_cached = len(seq.prefix_keys)
        if num_full > num_cached:
            full = [*self.index.further(seq.prefix_keys, seq.token_ids, num_full * self.block_size, seq.cache_salt)]
            seq.prefix_keys += [key for _, key in full]
            # If another sequence filled a block with the same tokens first, its block stays in the cache.
            cached = self.index.enter(full, seq.block_table[num_cached:num_full])
            self.observer.blocks_changed("cached", seq, cached)

    def forget_cached(self, seq: Sequence) -> None:
        """Remove the blocks with the sequence's keys from the prefix cache, but not from sequences that share them."""
        for key in seq.prefix_keys:
            if key in self.index.ids:
                self.evict(self.index.ids[key])

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache, but not from the sequences that hold it. New weights may follow."""
        for block in list(self.index.ids.values()):
            self.evict(block)

    def evict(self, block: int) -> None:
        """Remove a cached block from the prefix cache, but not from the sequences that hold it."""
        self.index.remove(block)
        self.observer.block_evicted(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of the parent's blocks with a child, whose tokens and num_computed_tokens the caller sets."""
        child.block_table, child.prefix_keys = list(parent.block_table), list(parent.prefix_keys)
        self.blocks.hold(child.block_table)
        self.observer.blocks_forked(parent, child, child.block_table)

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks, the last first, so that the start of a prompt, which others may share, is kept."""
        self.observer.blocks_changed("freed", seq, seq.block_table)
        self.blocks.drop(reversed(seq.block_table))
        seq.block_table.clear()
        seq.prefix_keys.clear()

    def close(self) -> None:
        """Do what is to be done before the engine ends: nothing."""

    # ---- inside

    def _take(self) -> int:
        """Take a free block. If none is empty, the content of a cached block leaves the prefix cache."""
        if not self.blocks.empty:
            evicted = self.choose_evicted(self.blocks.reusable.keys())
            assert evicted in self.blocks.reusable, "choose_evicted returns one of the candidates"
            self.evict(evicted)
        return self.blocks.take()
