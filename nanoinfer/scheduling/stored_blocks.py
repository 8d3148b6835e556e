"""A prefix cache that goes on in a store: blocks that leave the memory are kept there, and read when a prompt begins like them.

In and out: as block_manager.py, whose methods these extend. It knows keys and block ids. The store, which is a folder of files
(execution/block_files.py), has the contents of the blocks.

    memory    [ the cat sat on | the mat and it ]                  a prompt's first blocks are found here
    store                                       [ was warm and ]   and the next one there: it is read into a free block

The key of a block is the SHA-256 digest of the store's fingerprint, of the salt, and of all tokens up to the end of the block.
So every process that would compute the same block has the same key for it.

Others wait while a step reads. So while sequences run, a step that has read as many tokens as it may compute starts no more.
The sequence that it has read for starts in a later step, and finds these blocks in memory.
"""

import hashlib
import weakref
from array import array
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from nanoinfer.scheduling.block_manager import _ROOT, BlockManager
from nanoinfer.scheduling.sequence import Sequence


class BlockStore(Protocol):
    """Where the contents of blocks are kept.

    Attributes:
        fingerprint: 32 bytes, others where the same tokens would have other keys and values.
        max_blocks: the most blocks that fit.
        is_open: whether it may be used: until close(), in the process that made it.
        counts: for the metrics, with external_prefix_cache_hits in tokens.
    """

    fingerprint: bytes
    max_blocks: int
    counts: dict[str, int]

    @property
    def is_open(self) -> bool: ...
    def find(self, key: int) -> Any | None: ...  # the content as it was kept, or None
    def fill(self, block: int, content: Any) -> None: ...  # writes it into a block
    def touch(self, keys: Iterable[int]) -> None: ...  # the last one is then the most recently used
    def keep(self, key: int, block: int, *, wait: bool = False) -> None: ...  # if not `wait`, only if it has time
    def discard(self, key: int) -> None: ...
    def close(self) -> None: ...  # writes what it has not written yet


def with_store(base: type[BlockManager], store: BlockStore, max_tokens_per_step: int) -> type[BlockManager]:
    """Return a block manager that also keeps blocks in the store. max_tokens_per_step: after which a step reads no more."""
    return type(base.__name__, (StoredBlocks, base), {"store": store, "max_tokens_per_step": max_tokens_per_step})


class StoredBlocks(BlockManager):
    """A BlockManager with a store."""

    store: BlockStore
    max_tokens_per_step: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_tokens_read = 0  # in this step
        self._untouched: set[int] = set()  # blocks that were read for a sequence that has not started
        # Without a reference to the manager, so that this also happens when an LLM is dropped, or its process ends.
        self._keep_all = weakref.finalize(self, _keep_all, self.store, self._reusable, self._content, self._cached)

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> list[tuple[int, int]]:
        """Return the longest chain of blocks in memory and store, and read the latter, if there is room for all tokens."""
        matched = super().match_prefix(token_ids, cache_salt)
        others_run = self.num_free_blocks < self.num_blocks
        if not self.store.is_open or not self.can_start(len(token_ids), matched):
            return matched
        for _, block in matched:  # held until all are read, so that none is taken for another
            self._hold(block)
        for start in range(len(matched) * self.block_size, len(token_ids) - self.block_size, self.block_size):
            parent = matched[-1][0] if matched else cache_salt or _ROOT
            content = parent, tuple(token_ids[start : start + self.block_size])
            if content in self._cached:  # the block before it was evicted, and this one was not
                self._hold(self._cached[content][1])
            elif (others_run and self._num_tokens_read >= self.max_tokens_per_step) or not self._read(content):
                break
            matched.append(self._cached[content])
        for _, block in reversed(matched):  # as in free(), the start of a prompt stays longest
            self._drop(block)
        return matched

    def can_start(self, num_tokens: int, prefix: list[tuple[int, int]], *, num_kept_free: int = 0) -> bool:
        if self._num_tokens_read >= self.max_tokens_per_step and self.num_free_blocks < self.num_blocks:
            return False  # there may be more to read
        return super().can_start(num_tokens, prefix, num_kept_free=num_kept_free)

    def start(self, seq: Sequence, prefix: list[tuple[int, int]]) -> None:
        super().start(seq, prefix)
        if not self._untouched.isdisjoint(seq.block_table):  # once, although several steps may have read
            self.store.touch(reversed(seq.prefix_keys))
            self._untouched.difference_update(seq.block_table)

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        super().cache_finished_blocks(seq, num_tokens)
        self._num_tokens_read = 0  # because the step was launched

    def choose_evicted(self, candidates: Collection[int]) -> int:
        block = super().choose_evicted(candidates)
        if self.store.is_open and block in self._content:
            self.store.keep(self._cached[self._content[block]][0], block)
        return block

    def forget_cached(self, seq: Sequence) -> None:
        for key in seq.prefix_keys if self.store.is_open else ():
            self.store.discard(key)
        super().forget_cached(seq)

    def reset_prefix_cache(self) -> None:
        """Also leave the store for good, because new weights may follow, to which its fingerprint does not belong."""
        super().reset_prefix_cache()
        self.store.close()

    def close(self) -> None:
        self._keep_all()

    # ---- inside

    def _new_key(self, content: tuple[int | str, tuple[int, ...]]) -> int:
        parent, token_ids = content
        if isinstance(parent, str) or parent == _ROOT:
            salt = parent.encode(errors="surrogatepass") if isinstance(parent, str) else b""
            before = hashlib.sha256(self.store.fingerprint + salt).digest()
        else:
            before = parent.to_bytes(32, "big")
        return int.from_bytes(hashlib.sha256(before + array("q", token_ids).tobytes()).digest(), "big")

    def _hold(self, block: int) -> None:
        self._reusable.pop(block, None)
        self._ref_counts[block] += 1

    def _read(self, content: tuple[int | str, tuple[int, ...]]) -> bool:
        """Read a block into a free one, and hold it. Return False if the store does not have it."""
        key = self._new_key(content)
        if (found := self.store.find(key)) is None:
            return False
        block = self._take()
        self.store.fill(block, found)
        self._cached[content], self._content[block] = (key, block), content
        self._untouched.add(block)
        self._num_tokens_read += self.block_size
        self.store.counts["external_prefix_cache_hits"] += self.block_size
        return True


def _keep_all(store: BlockStore, free: Iterable[int], content: dict[int, Any], cached: dict[Any, tuple[int, int]]) -> None:
    """Keep the free blocks that are cached, or the most recently used ones for which there is room, and close the store."""
    if store.is_open:
        for block in [*free][-store.max_blocks :]:
            if (entry := content.get(block)) is not None:
                key, _ = cached[entry]
                store.keep(key, block, wait=True)
                if content.get(block) != entry:  # at the end of a process, an engine's thread may still take blocks
                    store.discard(key)
        store.close()
