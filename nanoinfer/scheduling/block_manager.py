"""Which cache blocks belong to whom. Pure bookkeeping: block ids and counts, no tensor.

A sequence's tokens lie in blocks of `block_size` slots; its block table lists them in order. Token i of a sequence lies in
slot `block_table[i // block_size] * block_size + i % block_size`. Three ideas live here:

- Reference counts. A block may stand in several block tables: after a prefix hit, or after a fork. It is free at count zero.
- Prefix caching. A finished block is known by (key of the block before it, its token ids), so a chain of lookups from the
  start of a prompt finds the blocks that already hold it. The token ids themselves are compared, by the dict, so two prefixes
  whose hashes collide are never confused. Freed blocks keep their content until they are needed for something else, the
  least recently used first.
- Copy on write. A fork shares all blocks, the half-filled last one too. Whoever writes into a shared block first gets a copy
  of its own; the copy is owed by the runner, before the forward pass.

    tokens   [ the cat sat on | the mat and     ]         block_size 4
    table    [       7        |        2        ]         7 is finished and has a key; 2 is being filled

Source: PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180; the keys differ from vLLM's, which are hashes.
"""

from collections import OrderedDict
from itertools import count

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tracing import (
    BlockCopied,
    BlockEvicted,
    BlocksAllocated,
    BlocksCached,
    BlocksForked,
    BlocksFreed,
    BlocksShared,
    Tracer,
)

_ROOT = -1  # the key before the first block


class BlockManager:
    """Owns block ids 0 .. num_blocks - 1, every Sequence.block_table and every Sequence.prefix_keys.

    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> seq = Sequence("r0", [5, 6, 7], SamplingParams(), seed=0, max_num_tokens=8)
    >>> manager.allocate(seq, 3), seq.block_table, manager.num_free_blocks
    ([], [0, 1], 2)
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, tracer: Tracer | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tracer = tracer
        self._ref_counts = [0] * num_blocks
        # Free blocks in the order they will be taken: empty ones first, then cached ones, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._new_key = count()
        self._cached: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (parent key, ids) -> (key, block)
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its entry in _cached

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds. Some may still be found by a prefix until they are taken."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- asking

    def match_prefix(self, token_ids: list[int]) -> list[tuple[int, int]]:
        """The longest chain of finished blocks that hold the start of token_ids, as (key, block).

        It stops one token short of the whole: the last token must be computed, for its logits.
        """
        matched: list[tuple[int, int]] = []
        if not self.enable_prefix_caching:
            return matched
        key = _ROOT
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            found = self._cached.get((key, tuple(token_ids[start : start + self.block_size])))
            if found is None:
                break
            matched.append(found)
            key = found[0]
        return matched

    def can_start(self, num_tokens: int, prefix: list[tuple[int, int]], *, num_kept_free: int = 0) -> bool:
        """Are there blocks for all tokens of a waiting sequence whose match_prefix this is, and so many besides?"""
        num_revived = sum(block in self._free for _, block in prefix)
        num_needed = self.num_blocks_for(num_tokens) - len(prefix) + num_revived
        return num_needed + num_kept_free <= len(self._free)

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        return self._num_blocks_needed(seq, num_new_tokens) <= len(self._free)

    # ---- changing

    def start(self, seq: Sequence, prefix: list[tuple[int, int]]) -> None:
        """Give a waiting sequence the cached blocks of its prefix, as match_prefix has just found them."""
        assert not seq.block_table, "a sequence starts with an empty block table"
        for key, block in prefix:
            self._free.pop(block, None)
            self._ref_counts[block] += 1
            seq.block_table.append(block)
            seq.prefix_keys.append(key)
        if self.tracer is not None and prefix:
            self.tracer.emit(BlocksShared(seq.sequence_id, tuple(seq.block_table)))

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Make room for the sequence's next tokens. Returns the copies owed before they are written, as (from, to) blocks.

        Ask can_allocate first.
        """
        copies = []
        for index in self._shared_blocks_to_write(seq):
            shared = seq.block_table[index]
            seq.block_table[index] = self._take()
            self._drop(shared)
            copies.append((shared, seq.block_table[index]))
            if self.tracer is not None:
                self.tracer.emit(BlockCopied(seq.sequence_id, *copies[-1]))
        num_before = len(seq.block_table)
        while len(seq.block_table) * self.block_size < seq.num_computed_tokens + num_new_tokens:
            seq.block_table.append(self._take())
        if self.tracer is not None and len(seq.block_table) > num_before:
            self.tracer.emit(BlocksAllocated(seq.sequence_id, tuple(seq.block_table[num_before:])))
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the blocks that the sequence's first num_tokens fill findable. Call it once those tokens are in the cache."""
        if not self.enable_prefix_caching:
            return
        cached = []
        for index in range(len(seq.prefix_keys), num_tokens // self.block_size):
            parent = seq.prefix_keys[-1] if seq.prefix_keys else _ROOT
            start = index * self.block_size
            content = (parent, tuple(seq.token_ids[start : start + self.block_size]))
            if content not in self._cached:
                block = seq.block_table[index]
                self._cached[content] = (next(self._new_key), block)
                self._content[block] = content
                cached.append(block)
            # Where another sequence finished the same tokens first, its block stays the one that is found,
            # and this chain goes on from that block's key.
            seq.prefix_keys.append(self._cached[content][0])
        if self.tracer is not None and cached:
            self.tracer.emit(BlocksCached(seq.sequence_id, tuple(cached)))

    def forget_cached(self, seq: Sequence) -> None:
        """Let nobody find the sequence's blocks by their content any more. Whoever shares them keeps them."""
        for block in seq.block_table:
            if block in self._content:
                self._evict(block)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share all of its parent's blocks. Its tokens and num_computed_tokens are the caller's to set."""
        assert not child.block_table, "a fork starts with an empty block table"
        for block in parent.block_table:
            self._ref_counts[block] += 1
        child.block_table = list(parent.block_table)
        child.prefix_keys = list(parent.prefix_keys)
        if self.tracer is not None:
            self.tracer.emit(BlocksForked(parent.sequence_id, child.sequence_id, tuple(child.block_table)))

    def free(self, seq: Sequence) -> None:
        """Give the sequence's blocks back: the last first, so that the start of a prompt, which others share, lives longest."""
        if self.tracer is not None and seq.block_table:
            self.tracer.emit(BlocksFreed(seq.sequence_id, tuple(seq.block_table)))
        while seq.block_table:
            self._drop(seq.block_table.pop())
        seq.prefix_keys.clear()

    # ---- inside

    def _shared_blocks_to_write(self, seq: Sequence) -> range | list[int]:
        """Indices of the blocks that the next tokens fall into and that somebody else holds too: after a fork, at most one."""
        first = seq.num_computed_tokens // self.block_size
        return [i for i in range(first, len(seq.block_table)) if self._ref_counts[seq.block_table[i]] > 1]

    def _num_blocks_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        num_missing = self.num_blocks_for(seq.num_computed_tokens + num_new_tokens) - len(seq.block_table)
        return max(num_missing, 0) + len(self._shared_blocks_to_write(seq))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if block in self._content:
            self._evict(block)
        self._ref_counts[block] = 1
        return block

    def _evict(self, block: int) -> None:
        """From here on nobody finds its content."""
        del self._cached[self._content.pop(block)]
        if self.tracer is not None:
            self.tracer.emit(BlockEvicted(block))

    def _drop(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free[block] = None
            if block not in self._content:
                self._free.move_to_end(block, last=False)
