"""Which ids are held, and what the free ones still contain. Pure bookkeeping: counts, no tensor.

A BlockManager has a pool of blocks, and for models with states (state_slots.py) a second one of slots.

    held       in at least one sequence: its reference count says in how many places
    reusable   free, and its content is in the prefix index, where a prompt may find it
    empty      free, and without content that could be found
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

NO_BLOCK = -1  # in place of a block that is not there, or of a slot


class Pool:
    """Ids 0 .. size - 1.

    Attributes:
        ref_counts: of each id.
        empty: in the order in which they are taken.
        reusable: the least recently used first.
        contents: what each id holds for the prefix index, held or free. b"": the id is not in the index.
        parts: the part of the index that each id with a content belongs to.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ref_counts = [0] * size
        self.empty = deque(range(size))
        self.reusable: OrderedDict[int, None] = OrderedDict()
        self.contents = [b""] * size
        self.parts = [0] * size

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.reusable)

    def take(self) -> int:
        """Take an empty id, of which there must be one."""
        taken = self.empty.popleft()
        self.ref_counts[taken] = 1
        return taken

    def hold(self, ids: Iterable[int]) -> None:
        """Add a reference to each."""
        reusable, ref_counts = self.reusable, self.ref_counts
        for held in ids:
            reusable.pop(held, None)
            ref_counts[held] += 1

    def drop(self, ids: Iterable[int]) -> None:
        """Remove a reference from each. Without any, it is free: reusable as the most recently used one, or empty."""
        for dropped in ids:
            self.ref_counts[dropped] -= 1
            if self.ref_counts[dropped] == 0:
                if self.contents[dropped]:
                    self.reusable[dropped] = None
                else:
                    self.empty.appendleft(dropped)

    def forget(self, forgotten: int) -> None:
        """Remove an id's content. A free id is then empty."""
        self.contents[forgotten] = b""
        if forgotten in self.reusable:
            del self.reusable[forgotten]
            self.empty.append(forgotten)
