"""Decide which cache blocks belong to which sequence. Pure bookkeeping: block ids and counts, no tensor.

A sequence's tokens are stored in blocks of `block_size` slots, and its block table lists these blocks in order, so token i has
slot `block_table[i // block_size] * block_size + i % block_size`. There are three mechanisms:

- Reference counts: after a prefix hit or a fork, a block is in several block tables, and it is free at count zero.
- Prefix caching: a full block is identified by (key of the block before it, its token ids), so a chain of lookups from the
  start of a prompt finds the blocks that already hold it. The dict compares the token ids themselves, so prefixes whose
  hashes collide are never confused. Freed blocks keep their content until they are needed, the least recently used first.
- Copy on write: a fork shares all blocks, including the partly filled last one. Before a sequence writes into a shared block,
  it gets its own copy, which the executor makes before the forward pass.

    tokens   [ the cat sat on | the mat and     ]         block_size 4
    table    [       7        |        2        ]         7 is full and has a key, 2 is being filled

A subclass may override choose_evicted, which decides what the prefix cache forgets, and extend start and evict to count hits:
LLM(block_manager_cls=...). kv_groups.py has block tables for sliding windows, stored_blocks.py a prefix cache in files.

Source: PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180. The keys differ from vLLM's, which are hashes.
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from itertools import count

from nanoinfer import tracing
from nanoinfer.scheduling.sequence import Sequence

_ROOT = -1  # the key before the first block of a sequence without a cache_salt


class BlockManager:
    """Owns block ids 0 .. num_blocks - 1, every Sequence.block_table and every Sequence.prefix_keys.

    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> seq = Sequence("r0", [5, 6, 7], SamplingParams(), seed=0, max_num_tokens=8)
    >>> manager.allocate(seq, 3), seq.block_table, manager.num_free_blocks
    ([], [0, 1], 2)
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, tracer: "tracing.Tracer | None" = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tracer = tracer
        self._ref_counts = [0] * num_blocks
        # Free blocks: empty ones, which are taken first, and cached ones, the least recently used first.
        self._empty = deque(range(num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._keys = count()
        self._cached: dict[tuple[int | str, tuple[int, ...]], tuple[int, int]] = {}  # (parent key, ids) -> (key, block)
        self._content: dict[int, tuple[int | str, tuple[int, ...]]] = {}  # block -> its entry in _cached

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks in no block table, some of which stay in the prefix cache until they are taken."""
        return len(self._empty) + len(self._reusable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_for_forks(self, num_forks: int, num_shared_tokens: int, num_tokens: int) -> int:
        """Return the most blocks that forks need to grow to num_tokens each, of which the first ones are shared."""
        num_shared = num_shared_tokens // self.block_size
        return num_shared + num_forks * (self.num_blocks_for(num_tokens) - num_shared)

    def num_held_blocks(self, seq: Sequence) -> int:
        return len(seq.block_table)

    # ---- for subclasses to override

    def choose_evicted(self, candidates: Collection[int]) -> int:
        """Choose the cached block that is taken next, when no free block is empty. Its content leaves the prefix cache.

        candidates: the free cached blocks, the least recently used first, of which there is at least one.
        """
        return next(iter(candidates))

    # ---- queries

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> list[tuple[int, int]]:
        """Return the longest chain of full cached blocks that hold the start of token_ids, as (key, block).

        The last token is never included, because it must be computed for its logits. Blocks have the salt that they were
        computed with, so that requests with different salts share none.
        """
        matched: list[tuple[int, int]] = []
        if not self.enable_prefix_caching:
            return matched
        key: int | str = cache_salt or _ROOT
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            found = self._cached.get((key, tuple(token_ids[start : start + self.block_size])))
            if found is None:
                break
            matched.append(found)
            key = found[0]
        return matched

    def can_start(self, num_tokens: int, prefix: list[tuple[int, int]], *, num_kept_free: int = 0) -> bool:
        """Return whether there are blocks for all tokens of a waiting sequence with this prefix, and num_kept_free more."""
        num_revived = sum(block in self._reusable for _, block in prefix)
        num_needed = self.num_blocks_for(num_tokens) - len(prefix) + num_revived
        return num_needed + num_kept_free <= self.num_free_blocks

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        num_missing = self.num_blocks_for(seq.num_computed_tokens + num_new_tokens) - len(seq.block_table)
        return max(num_missing, 0) + len(self._shared_blocks_to_write(seq)) <= self.num_free_blocks

    # ---- changes

    def start(self, seq: Sequence, prefix: list[tuple[int, int]]) -> None:
        """Give a waiting sequence the cached blocks of its prefix, as match_prefix has just returned them."""
        assert not seq.block_table, "a sequence starts with an empty block table"
        for key, block in prefix:
            self._reusable.pop(block, None)
            self._ref_counts[block] += 1
            seq.block_table.append(block)
            seq.prefix_keys.append(key)
        if self.tracer is not None and prefix:
            self.tracer.emit(tracing.BlocksShared(seq.sequence_id, tuple(seq.block_table)))

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks for the sequence's next tokens, which can_allocate has confirmed.

        Returns the (from, to) blocks to copy before these tokens are written.
        """
        copies = []
        for index in self._shared_blocks_to_write(seq):
            shared = seq.block_table[index]
            seq.block_table[index] = self._take()
            self._drop(shared)
            copies.append((shared, seq.block_table[index]))
            if self.tracer is not None:
                self.tracer.emit(tracing.BlockCopied(seq.sequence_id, *copies[-1]))
        num_before = len(seq.block_table)
        while len(seq.block_table) * self.block_size < seq.num_computed_tokens + num_new_tokens:
            seq.block_table.append(self._take())
        if self.tracer is not None and len(seq.block_table) > num_before:
            self.tracer.emit(tracing.BlocksAllocated(seq.sequence_id, tuple(seq.block_table[num_before:])))
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add the blocks that the sequence's first num_tokens fill, which must be computed, to the prefix cache."""
        if not self.enable_prefix_caching or seq.reader is not None:
            return
        cached = []
        for index in range(len(seq.prefix_keys), num_tokens // self.block_size):
            parent = seq.prefix_keys[-1] if seq.prefix_keys else seq.cache_salt or _ROOT
            start = index * self.block_size
            content = (parent, tuple(seq.token_ids[start : start + self.block_size]))
            if content not in self._cached:
                block = seq.block_table[index]
                self._cached[content] = (self._new_key(content), block)
                self._content[block] = content
                cached.append(block)
            # If another sequence filled a block with the same tokens first, its block stays in the cache, and this chain
            # continues from that block's key.
            seq.prefix_keys.append(self._cached[content][0])
        if self.tracer is not None and cached:
            self.tracer.emit(tracing.BlocksCached(seq.sequence_id, tuple(cached)))

    def forget_cached(self, seq: Sequence) -> None:
        """Remove the sequence's blocks from the prefix cache, but not from sequences that share them."""
        for block in seq.block_table:
            if block in self._content:
                self.evict(block)

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache, but not from the sequences that hold it."""
        for block in list(self._content):
            self.evict(block)

    def evict(self, block: int) -> None:
        """Remove a cached block from the prefix cache, but not from the sequences that hold it."""
        del self._cached[self._content.pop(block)]
        if block in self._reusable:
            del self._reusable[block]
            self._empty.append(block)
        if self.tracer is not None:
            self.tracer.emit(tracing.BlockEvicted(block))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all of the parent's blocks with a child, whose tokens and num_computed_tokens the caller sets."""
        assert not child.block_table, "a fork starts with an empty block table"
        for block in parent.block_table:
            self._ref_counts[block] += 1
        child.block_table = list(parent.block_table)
        child.prefix_keys = list(parent.prefix_keys)
        if self.tracer is not None:
            self.tracer.emit(tracing.BlocksForked(parent.sequence_id, child.sequence_id, tuple(child.block_table)))

    def free(self, seq: Sequence) -> None:
        """Free the sequence's blocks, the last first, so that the start of a prompt, which others may share, stays longest."""
        if self.tracer is not None and seq.block_table:
            self.tracer.emit(tracing.BlocksFreed(seq.sequence_id, tuple(seq.block_table)))
        while seq.block_table:
            self._drop(seq.block_table.pop())
        seq.prefix_keys.clear()

    def close(self) -> None:
        """The engine ends (stored_blocks.py)."""

    # ---- inside

    def _new_key(self, content: tuple[int | str, tuple[int, ...]]) -> int:
        return next(self._keys)

    def _shared_blocks_to_write(self, seq: Sequence) -> range | list[int]:
        """Return the indices of the shared blocks that the next tokens are written to, at most one after a fork."""
        first = seq.num_computed_tokens // self.block_size
        return [i for i in range(first, len(seq.block_table)) if self._ref_counts[seq.block_table[i]] > 1]

    def _take(self) -> int:
        if not self._empty:
            evicted = self.choose_evicted(self._reusable.keys())
            assert evicted in self._reusable, "choose_evicted returns one of the candidates"
            self.evict(evicted)
        block = self._empty.popleft()
        self._ref_counts[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._content:
                self._reusable[block] = None
            else:
                self._empty.appendleft(block)
