"""Which blocks hold the beginning of a prompt: the prefix cache of a BlockManager. Pure bookkeeping: keys and ids, no tensor.

A full block has a key, the SHA-256 digest of all tokens up to its end:

    key of block i = digest(key of block i - 1, tokens of block i)          before the first block: digest(fingerprint, salt)

So a key says what a block contains, whoever computed it, and contents with different keys are different. That prefixes with
different tokens have different keys is a promise of SHA-256: nobody has found two inputs with the same digest. A salt separates
tenants, and a request's salt contains the digest of its adapter. The fingerprint is empty unless there is a store.

A Node is such a content. It is found by the key before it and its tokens, so that a lookup computes no digest. The index has a
part for each KV group, and one for states, and a node has the id of a block or slot in each part. This is the first tier. The
second one is a store (stored_blocks.py), whose entries are (key, part).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from struct import Struct

from nanoinfer.scheduling.pool import NO_BLOCK, Node, Pool

IN_STORE = -2  # in a Prefix: only the store has this block

IsStored = Callable[[tuple[bytes, int]], bool]  # whether a store has the entry (key, part)


@dataclass(frozen=True, slots=True)
class CachePart:
    """A KV group with its window in tokens, or the states. pool: of its ids."""

    window: int | None
    pool: Pool


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks that hold the beginning of a prompt. Its length is a number of blocks.

    Attributes:
        nodes: of the blocks, in order.
        tables: for each part of the index, the id of each node, or NO_BLOCK where the part does not need it.
    """

    nodes: list[Node] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """The keys, each with its block in the first KV group."""
        return ((node.key, block) for node, block in zip(self.nodes, self.tables[0] if self.nodes else (), strict=True))


class PrefixIndex:
    """The nodes whose contents are in memory. `parts` begins with the KV groups, in their order."""

    def __init__(self, parts: list[CachePart], block_size: int, fingerprint: bytes = b"") -> None:
        self.parts, self.block_size, self._fingerprint = parts, block_size, fingerprint
        self._nodes: dict[tuple[bytes, tuple[int, ...]], Node] = {}
        self._pack = Struct(f"{block_size}q").pack
        self._complete = next((number for number, part in enumerate(parts) if part.window is None), None)

    # ---- queries

    def root(self, cache_salt: str | None) -> bytes:
        """Return the key before the first block."""
        return sha256(self._fingerprint + (cache_salt or "").encode(errors="surrogatepass")).digest()

    def node(self, parent: bytes, token_ids: list[int]) -> Node:
        """Return the node of a block, given the key before it and its tokens. A new one is not in the index yet."""
        content = parent, tuple(token_ids)
        if (node := self._nodes.get(content)) is not None:
            return node
        return Node(sha256(parent + self._pack(*token_ids)).digest(), content, [NO_BLOCK] * len(self.parts))

    def chain(self, token_ids: list[int], cache_salt: str | None) -> list[Node]:
        """Return the nodes of the first blocks of token_ids, up to the first block that no part has.

        The last token is never included, because it must be computed for its logits.
        """
        nodes, key, find = [], self.root(cache_salt), self._nodes.get
        in_blocks = zip(*[iter(token_ids)] * self.block_size, strict=False)  # tuples of block_size tokens, without the rest
        for tokens in islice(in_blocks, max(len(token_ids) - 1, 0) // self.block_size):
            node = find((key, tokens))
            if node is None:
                break
            nodes.append(node)
            key = node.key
        return nodes

    def match(self, token_ids: list[int], cache_salt: str | None, is_stored: IsStored | None = None) -> Prefix:
        """Return the longest prefix that all parts can serve.

        A part with a window needs only the blocks that the first query after the prefix reaches.

        Args:
            is_stored: for a prefix in which both tiers count. None: only memory.
        """
        nodes = self.chain(token_ids, cache_salt)
        if is_stored is not None or self._complete is None:  # the prefix may go on after a block that is not in memory
            self._prolong(nodes, token_ids, cache_salt, is_stored)
        found = [[node.ids[part] for node in nodes] for part in range(len(self.parts))]
        if is_stored is not None:
            for part, ids in enumerate(found):
                ids[:] = [IN_STORE if i < 0 and is_stored((node.key, part)) else i for node, i in zip(nodes, ids, strict=True)]
        for length in range(len(nodes), 0, -1):
            firsts = [first_reached(length * self.block_size, part.window, self.block_size) for part in self.parts]
            needed = [ids[first:length] for ids, first in zip(found, firsts, strict=True)]
            if not any(NO_BLOCK in ids for ids in needed):
                return Prefix(nodes[:length], [[NO_BLOCK] * first + ids for ids, first in zip(needed, firsts, strict=True)])
        return Prefix()

    def _prolong(self, nodes: list[Node], token_ids: list[int], cache_salt: str | None, is_stored: IsStored | None) -> None:
        """Append the nodes of further blocks, up to one that a part without a window has in no tier."""
        size, part = self.block_size, self._complete
        for start in range(len(nodes) * size, len(token_ids) - size, size):
            node = self.node(nodes[-1].key if nodes else self.root(cache_salt), token_ids[start : start + size])
            if part is not None and node.ids[part] == NO_BLOCK and not (is_stored and is_stored((node.key, part))):
                break
            nodes.append(node)

    # ---- changes

    def current(self, node: Node) -> Node:
        """Return the node in the index with the same content, or this one, which may have left the index."""
        return self._nodes.get(node.content, node)

    def enter(self, node: Node, part: int, new: int) -> bool:
        """Add the id of a block or slot. Return False if the part has another one for this content, which stays."""
        node = self._nodes.setdefault(node.content, node)
        if node.ids[part] != NO_BLOCK:
            return False
        node.ids[part] = new
        self.parts[part].pool.entries[new] = node, part
        return True

    def remove(self, node: Node, part: int) -> None:
        """Remove an id from memory."""
        self.parts[part].pool.forget(node.ids[part])
        node.ids[part] = NO_BLOCK
        if node.ids.count(NO_BLOCK) == len(node.ids):
            del self._nodes[node.content]


def first_reached(position: int, window: int | None, block_size: int) -> int:
    """Return the index of the first block that a query at this position reaches. KVCache.num_blocks_before says the same."""
    return 0 if window is None else max(position - window + 1, 0) // block_size
