"""Count which blocks are held, and remember what the free blocks still contain. This is pure bookkeeping, no tensors."""

from collections import OrderedDict, deque
from collections.abc import Iterable


class Pool:
    """The ids 0 .. size - 1, each of which is held, reusable or empty.

        held       used by a sequence: its reference count says in how many places
        reusable   free, and its content is in the prefix index, where a prompt may find it
        empty      free, without content that could be found

    Attributes:
        ref_counts: the reference count of each id.
        empty: the empty ids, in the order in which they are taken.
        reusable: the reusable ids, the least recently used first.
        contents: the content of each id in the prefix index, whether held or free. b"": the id is not in the index.
    """

    def __init__(self, size: int) -> None:
        self.ref_counts = [0] * size
        self.empty = deque(range(size))
        self.reusable: OrderedDict[int, None] = OrderedDict()
        self.contents = [b""] * size

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.reusable)

    def take(self) -> int:
        """Take an empty id. At least one must be empty."""
        taken = self.empty.popleft()
        self.ref_counts[taken] = 1
        return taken

    def hold(self, ids: Iterable[int]) -> None:
        """Add a reference to each id."""
        reusable, ref_counts = self.reusable, self.ref_counts
        for held in ids:
            reusable.pop(held, None)
            ref_counts[held] += 1

    def drop(self, ids: Iterable[int]) -> None:
        """Remove a reference from each id. An id without references is free: empty, or reusable and the most recently used."""
        for dropped in ids:
            self.ref_counts[dropped] -= 1
            if self.ref_counts[dropped] == 0:
                if self.contents[dropped]:
                    self.reusable[dropped] = None
                else:
                    self.empty.appendleft(dropped)

    def forget(self, forgotten: int) -> None:
        """Remove an id's content. If the id is free, it becomes empty."""
        self.contents[forgotten] = b""
        if forgotten in self.reusable:
            del self.reusable[forgotten]
            self.empty.append(forgotten)
