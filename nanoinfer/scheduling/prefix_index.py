"""Find the blocks that hold the beginning of a prompt: the prefix cache of a BlockManager. It knows keys and ids, no tensors.

A full block has a content and a key, both bytes, which describe what the block holds, whoever computed it:

    content of block i = key of block i - 1, tokens of block i
    key of block i     = SHA-256 digest of its content                  before the first block: digest of fingerprint, salt

So a key stands for all tokens up to a block's end. Prefixes with different tokens have different keys as long as nobody finds
two inputs with the same SHA-256 digest. A salt separates tenants, and a request's salt contains the digest of
its adapter. The fingerprint is empty unless there is a store.

The keys of the contents in memory are kept, so that a lookup computes no digest. Memory is the first tier. The second tier is a
store (stored_blocks.py), whose entries are (key, group).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice, repeat, starmap
from struct import Struct

from nanoinfer.scheduling.pool import NO_BLOCK, Pool

IN_STORE = -2  # in a Prefix: this block is only in the store

IsStored = Callable[[tuple[bytes, int]], bool]  # whether a store has the entry (key, group)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A KV group with its window in tokens, or the states. pool: counts its ids. ids: the id of each key in memory."""

    window: int | None
    pool: Pool
    ids: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks that hold the beginning of a prompt. Its length is a number of blocks.

    Attributes:
        keys: the keys of the blocks, in order.
        tables: for each cache group, the id of each key, or NO_BLOCK if the group does not need the block.
    """

    keys: list[bytes] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Yield the keys, each with its block in the first KV group."""
        return zip(self.keys, self.tables[0] if self.keys else (), strict=True)


class PrefixIndex:
    """The index of all contents in memory.

    Attributes:
        groups: the KV groups in their order, then the states if the model keeps any.
        keys: the key of each content.
    """

    def __init__(self, groups: list[CacheGroup], block_size: int, fingerprint: bytes = b"") -> None:
        self.groups, self.block_size, self._fingerprint = groups, block_size, fingerprint
        self.keys: dict[bytes, bytes] = {}
        self._pack = Struct(f"{block_size}i").pack
        self._complete = next(((group, number) for number, group in enumerate(groups) if group.window is None), (None, -1))

    # ---- queries

    def root(self, cache_salt: str | None) -> bytes:
        """Return the key before the first block."""
        return sha256(self._fingerprint + (cache_salt or "").encode(errors="surrogatepass")).digest()

    def in_blocks(self, token_ids: list[int]) -> Iterator[bytes]:
        """Yield the tokens of each full block, as bytes."""
        return starmap(self._pack, zip(*[iter(token_ids)] * self.block_size, strict=False))

    def further(self, keys: list[bytes], token_ids: list[int], end: int, salt: str | None) -> Iterator[tuple[bytes, bytes]]:
        """Yield content and key of the full blocks of token_ids[:end] that follow those with the first keys."""
        key, find = keys[-1] if keys else self.root(salt), self.keys.get
        for tokens in self.in_blocks(token_ids[len(keys) * self.block_size : end]):
            content = key + tokens
            key = find(content) or sha256(content).digest()
            yield content, key

    def chain(self, token_ids: list[int], cache_salt: str | None) -> list[bytes]:
        """Return the keys of the first blocks of token_ids, up to the first block that is in no cache group.

        The last token is never included, because it must be computed for its logits.
        """
        keys: list[bytes] = []
        key, find = self.root(cache_salt), self.keys.get
        for tokens in islice(self.in_blocks(token_ids), max(len(token_ids) - 1, 0) // self.block_size):
            if (found := find(key + tokens)) is None:
                break
            keys.append(key := found)
        return keys

    def match(self, token_ids: list[int], cache_salt: str | None, is_stored: IsStored | None = None) -> Prefix:
        """Return the longest prefix that all cache groups can serve.

        In a group with a window, only the blocks that the first query after the prefix reaches are needed.

        Args:
            is_stored: whether an entry is in the store, whose blocks then count as well. None: only memory counts.
        """
        keys, (complete, number) = self.chain(token_ids, cache_salt), self._complete
        if is_stored is not None or complete is None:  # the prefix may continue after a block that is not in memory
            for _, key in self.further(keys, token_ids, len(token_ids) - 1, cache_salt):
                if complete and key not in complete.ids and not (is_stored and is_stored((key, number))):
                    break
                keys.append(key)
        elif len(self.groups) == 1:  # the usual case: the only group has all of the keys
            return Prefix(keys, [[*map(complete.ids.__getitem__, keys)]] if keys else [])
        found = [[*map(group.ids.get, keys, repeat(NO_BLOCK))] for group in self.groups]
        if is_stored is not None:
            for group, ids in enumerate(found):
                ids[:] = [IN_STORE if i < 0 and is_stored((key, group)) else i for key, i in zip(keys, ids, strict=True)]
        for length in range(len(keys), 0, -1):
            firsts = [first_reached(length * self.block_size, group.window, self.block_size) for group in self.groups]
            needed = [ids[first:length] for ids, first in zip(found, firsts, strict=True)]
            if not any(NO_BLOCK in ids for ids in needed):
                return Prefix(keys[:length], [[NO_BLOCK] * first + ids for ids, first in zip(needed, firsts, strict=True)])
        return Prefix()

    # ---- changes

    def enter(self, blocks: list[tuple[bytes, bytes]], group: int, new: list[int]) -> list[int]:
        """Add an id for each content and key, except NO_BLOCK and keys that the group already has. Return the added ids."""
        entered, ids, pool = [], self.groups[group].ids, self.groups[group].pool
        for (content, key), block in zip(blocks, new, strict=True):
            if block != NO_BLOCK and ids.setdefault(key, block) == block:
                self.keys[content] = key
                pool.contents[block], pool.groups[block] = content, group
                entered.append(block)
        return entered

    def remove(self, key: bytes, group: int) -> None:
        """Remove an id from memory."""
        pool, removed = self.groups[group].pool, self.groups[group].ids.pop(key)
        for other in self.groups:
            if key in other.ids:
                break
        else:
            del self.keys[pool.contents[removed]]
        pool.forget(removed)


def first_reached(position: int, window: int | None, block_size: int) -> int:
    """Return the index of the first block that a query at this position reaches. It equals KVCache.num_blocks_before."""
    return 0 if window is None else max(position - window + 1, 0) // block_size
