"""Block tables for layers that keep different tokens: a sequence has one for each KV group, all with blocks of one pool.

In: the window of each group, in tokens, or None where every token is kept. Out: the methods of a BlockManager. It is used for
models with sliding windows only. It knows no layers: attention/kv_cache.py (`kv_groups`) makes the groups.

A group with a window keeps the blocks that the next query can still reach, and frees the others while the sequence runs. Their
places in its table are NO_BLOCK, so token i is in block `table[i // block_size]` of each group's table:

    tokens      | a a a a | b b b b | c c c c | d d     |     block_size 4, the next query is at position 14
    no window   |    7    |    2    |    9    |    4    |     it reaches every token
    window 6    |   -1    |   -1    |    8    |    5    |     it reaches tokens 9 to 14

A prefix hit is the longest prefix that all groups can serve: each needs the blocks that the first query after it reaches. So a
group may lack the first blocks of a prefix. A key is therefore not an entry of a chain, whose first ones could be missing, but
the SHA-256 digest of all tokens so far, as in vLLM.
"""

import hashlib
from array import array
from collections.abc import Sequence as ListLike
from itertools import chain

from nanoinfer import tracing
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence

NO_BLOCK = -1
Prefix = list[tuple[int, tuple[int, ...]]]  # of each block of the prefix: its key, and each group's block or NO_BLOCK


def most_blocks(num_tokens: int, windows: ListLike[int | None], block_size: int, chunk_size: int) -> int:
    """Return the most blocks that a sequence holds at a time, while it grows to num_tokens by at most chunk_size at a time.

    In a group with a window these are the blocks of the window and the chunk, and one more where they begin inside a block.

    >>> most_blocks(4000, [None, 512], block_size=64, chunk_size=256)
    76
    """
    num_for_all = -(-num_tokens // block_size)
    return sum(
        num_for_all if window is None else min(num_for_all, -(-(window + chunk_size) // block_size) + 1) for window in windows
    )


def with_groups(manager: type[BlockManager], windows: tuple[int | None, ...], chunk_size: int) -> type[BlockManager]:
    """Return a class of block managers for these groups, in which the methods that `manager` overrides still count."""
    bases = (GroupedBlockManager,) if manager is BlockManager else (manager, GroupedBlockManager)
    return type(manager.__name__, bases, {"windows": windows, "chunk_size": chunk_size})


class GroupedBlockManager(BlockManager):
    """A BlockManager for several KV groups, or for one with a window.

    Attributes:
        windows: of the groups. The first group's table is Sequence.block_table, the others are in more_block_tables.
        chunk_size: the most tokens of a sequence in a step.
    """

    windows: tuple[int | None, ...] = (None,)
    chunk_size = 1
    _asked: tuple[list[int], str | None, list[int]] = [], None, []  # match_prefix's last arguments, and the keys of the blocks

    def tables(self, seq: Sequence) -> list[list[int]]:
        """The block tables of a sequence, in the order of the groups."""
        seq.more_block_tables += [[] for _ in range(len(self.windows) - 1 - len(seq.more_block_tables))]
        return [seq.block_table, *seq.more_block_tables]

    def num_blocks_for(self, num_tokens: int) -> int:
        return most_blocks(num_tokens, self.windows, self.block_size, self.chunk_size)

    def num_blocks_for_forks(self, num_forks: int, num_shared_tokens: int, num_tokens: int) -> int:
        return num_forks * self.num_blocks_for(num_tokens)  # in the end windows hold none of the blocks that were shared

    def num_held_blocks(self, seq: Sequence) -> int:
        return len(self._held(seq))

    # ---- prefixes

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> Prefix:  # type: ignore[override]
        if self._asked[:2] != (token_ids, cache_salt):  # else a waiting prompt, which is asked for at each step
            self._asked = list(token_ids), cache_salt, []
        keys = self._asked[2]
        found: list[list[int]] = [[] for _ in self.windows]  # of each group: its block of each key
        for start in range(0, len(token_ids) - self.block_size, self.block_size) if self.enable_prefix_caching else ():
            if start == len(keys) * self.block_size:
                keys.append(self._next_key(keys, token_ids, start, cache_salt))
            key = keys[start // self.block_size]
            for group, blocks in enumerate(found):
                blocks.append(self._cached.get((key, (group,)), (0, NO_BLOCK))[1])
            if any(blocks[-1] == NO_BLOCK and window is None for blocks, window in zip(found, self.windows, strict=True)):
                break
        for length in range(len(found[0]), 0, -1):
            firsts = [self._first_reached(length * self.block_size, window) for window in self.windows]
            needed = [blocks[first:length] for first, blocks in zip(firsts, found, strict=True)]
            if not any(NO_BLOCK in blocks for blocks in needed):
                tables = [[NO_BLOCK] * first + blocks for first, blocks in zip(firsts, needed, strict=True)]
                return list(zip(keys[:length], zip(*tables, strict=True), strict=True))
        return []

    def can_start(self, num_tokens: int, prefix: Prefix, *, num_kept_free: int = 0) -> bool:  # type: ignore[override]
        blocks = [block for _, of_groups in prefix for block in of_groups if block != NO_BLOCK]
        num_revived = sum(block in self._reusable for block in blocks)
        num_needed = max(self.num_blocks_for(num_tokens) - len(blocks), 0) + num_revived
        return num_needed + num_kept_free <= self.num_free_blocks

    def start(self, seq: Sequence, prefix: Prefix) -> None:  # type: ignore[override]
        assert not seq.block_table, "a sequence starts with empty block tables"
        seq.prefix_keys = [key for key, _ in prefix]
        for group, table in enumerate(self.tables(seq)):
            table += [of_groups[group] for _, of_groups in prefix]
            self._emit("BlocksShared", seq, table, group)
        for block in self._held(seq):
            self._reusable.pop(block, None)
            self._ref_counts[block] += 1

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add full blocks to the prefix cache, and free those that no query after the first num_tokens reaches."""
        cached = []
        num_full = num_tokens // self.block_size if self.enable_prefix_caching and seq.reader is None else 0
        for index in range(len(seq.prefix_keys), num_full):
            seq.prefix_keys.append(self._next_key(seq.prefix_keys, seq.token_ids, index * self.block_size, seq.cache_salt))
            for group, table in enumerate(self.tables(seq)):
                content = (seq.prefix_keys[-1], (group,))
                if content not in self._cached and table[index] != NO_BLOCK:
                    self._cached[content] = (content[0], table[index])
                    self._content[table[index]] = content
                    cached.append(table[index])
        self._emit("BlocksCached", seq, cached)
        released = []
        for table, window in zip(self.tables(seq), self.windows, strict=True):
            first = index = self._first_reached(num_tokens, window)
            while index > 0 and table[index - 1] != NO_BLOCK:
                index -= 1
            released += table[index:first]
            table[index:first] = [NO_BLOCK] * (first - index)
        for block in released:
            self._drop(block)
        self._emit("BlocksReleased", seq, released)

    # ---- the other changes: as in BlockManager, for each of the tables

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        num_blocks = -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
        num_missing = sum(max(num_blocks - len(table), 0) for table in self.tables(seq))
        return num_missing + len(self._shared_places(seq)) <= self.num_free_blocks

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        copies = []
        for table, index in self._shared_places(seq):
            shared, table[index] = table[index], self._take()
            self._drop(shared)
            copies.append((shared, table[index]))
            if self.tracer is not None:
                self.tracer.emit(tracing.BlockCopied(seq.sequence_id, *copies[-1]))
        for group, table in enumerate(self.tables(seq)):
            num_before = len(table)
            while len(table) * self.block_size < seq.num_computed_tokens + num_new_tokens:
                table.append(self._take())
            self._emit("BlocksAllocated", seq, table[num_before:], group)
        return copies

    def forget_cached(self, seq: Sequence) -> None:
        for key in seq.prefix_keys:  # also of blocks that the windows have left
            for group in range(len(self.windows)):
                if (key, (group,)) in self._cached:
                    self.evict(self._cached[key, (group,)][1])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert not child.block_table, "a fork starts with empty block tables"
        child.block_table, *child.more_block_tables = (list(table) for table in self.tables(parent))
        child.prefix_keys = list(parent.prefix_keys)
        for block in self._held(child):
            self._ref_counts[block] += 1
        if self.tracer is not None:
            self.tracer.emit(tracing.BlocksForked(parent.sequence_id, child.sequence_id, tuple(self._held(child))))

    def free(self, seq: Sequence) -> None:
        self._emit("BlocksFreed", seq, self._held(seq))
        for blocks in zip(*map(reversed, self.tables(seq)), strict=True):  # the last first, in all groups
            for block in blocks:
                if block != NO_BLOCK:
                    self._drop(block)
        for table in self.tables(seq):
            table.clear()
        seq.prefix_keys.clear()

    # ---- inside

    def _first_reached(self, position: int, window: int | None) -> int:
        """The index of the first block that a query at this position reaches: KVCache.num_blocks_before says the same."""
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def _next_key(self, keys: list[int], token_ids: list[int], start: int, cache_salt: str | None) -> int:
        """The key of the block of the tokens from `start` on, which follows the blocks with these keys."""
        salt = (cache_salt or "").encode(errors="surrogatepass")
        parent = keys[-1].to_bytes(32, "big") if keys else hashlib.sha256(salt).digest()
        tokens = array("q", token_ids[start : start + self.block_size]).tobytes()
        return int.from_bytes(hashlib.sha256(parent + tokens).digest(), "big")

    def _held(self, seq: Sequence) -> list[int]:
        return [block for block in chain.from_iterable(self.tables(seq)) if block != NO_BLOCK]

    def _shared_places(self, seq: Sequence) -> list[tuple[list[int], int]]:
        """The shared blocks that the next tokens are written to, as (table, index): at most one of a table, after a fork."""
        first = seq.num_computed_tokens // self.block_size
        return [(table, i) for table in self.tables(seq) for i in range(first, len(table)) if self._ref_counts[table[i]] > 1]

    def _emit(self, event: str, seq: Sequence, blocks: list[int], group: int = 0) -> None:
        if self.tracer is not None and blocks:
            self.tracer.emit(getattr(tracing, event)(seq.sequence_id, tuple(blocks), group))
