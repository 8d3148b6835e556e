"""Find the blocks that hold the beginning of a prompt: the prefix cache of a BlockManager. It knows keys and ids, no tensors.

A salt separates tenants, and a request's salt contains the digest of its adapter.
"""

from collections.abc import Iterator
from hashlib import sha256
from itertools import islice, starmap
from struct import Struct

from nanoinfer.scheduling.pool import Pool

Prefix = list[tuple[bytes, int]]  # the keys of the blocks that hold the beginning of a prompt, each with its block


class PrefixIndex:
    """The index of all contents in memory. A full block has a content and a key, which describe what it holds.

        content of block i = key of block i - 1, tokens of block i
        key of block i     = SHA-256 digest of its content              before the first block: digest of the salt

    So a key stands for all tokens up to a block's end. Prefixes with different tokens have different keys as long as nobody
    finds two inputs with the same SHA-256 digest. The keys are kept, so that a lookup computes no digest.

    Attributes:
        pool: the pool of the blocks.
        keys: the key of each content.
        ids: the block of each key.
    """

    def __init__(self, pool: Pool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.keys: dict[bytes, bytes] = {}
        self.ids: dict[bytes, int] = {}
        self._pack = Struct(f"{block_size}i").pack

    # ---- queries

    def root(self, cache_salt: str | None) -> bytes:
        """Return the key before the first block."""
        return sha256((cache_salt or "").encode(errors="surrogatepass")).digest()

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
        """Return the keys of the first blocks of token_ids, up to the first block that is not in memory.

        The last token is never included, because it must be computed for its logits.
        """
        keys: list[bytes] = []
        key, find = self.root(cache_salt), self.keys.get
        for tokens in islice(self.in_blocks(token_ids), max(len(token_ids) - 1, 0) // self.block_size):
            if (found := find(key + tokens)) is None:
                break
            keys.append(key := found)
        return keys

    # ---- changes

    def enter(self, blocks: list[tuple[bytes, bytes]], new: list[int]) -> list[int]:
        """Add a block for each content and key, except for keys that have a block already. Return the added blocks."""
        entered = []
        for (content, key), block in zip(blocks, new, strict=True):
            if self.ids.setdefault(key, block) == block:
                self.keys[content], self.pool.contents[block] = key, content
                entered.append(block)
        return entered

    def remove(self, block: int) -> None:
        """Remove a block from the index. If it is free, it becomes empty."""
        del self.ids[self.keys.pop(self.pool.contents[block])]
        self.pool.forget(block)
