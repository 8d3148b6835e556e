"""What orders the accesses of a launch to global memory: barriers, and what programs release and acquire by atomic
instructions.

In: barriers, atomic instructions, and the place of each. Out: which accesses happened before others.

A program has a time, which rises at each barrier and each release. What happened in a program before its last barrier happened
before what its threads do now. A release publishes this at a place, together with what the releasing thread did itself and what
it knows of other programs. A thread that acquires at the place knows it, and so do all threads of its program after their next
barrier. Atomic instructions on a place form a chain, so that the last to arrive knows all of those before it. Source: the PTX
manual, "Memory Consistency Model".
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int]  # a tensor, and an element of it


@dataclass(slots=True)
class _Knowledge:
    """Which accesses happened before: of each program those before a time, and of some threads those up to a time."""

    before: NDArray
    own: dict[int, int] = field(default_factory=dict)

    def join(self, other: "_Knowledge") -> None:
        self.before = np.maximum(self.before, other.before)
        for thread, time in other.own.items():
            self.own[thread] = max(time, self.own.get(thread, 0))


class Order:
    """The order of a launch, whose threads are numbered through all programs."""

    def __init__(self, num_programs: int, num_threads: int) -> None:
        self.num_threads = num_threads
        self._now, self._last_barrier = np.zeros((2, num_programs), np.int64)
        self._known: dict[int, _Knowledge] = {}  # by program, for all of its threads
        self._acquired: dict[int, _Knowledge] = {}  # by thread, for it alone until its program meets
        self._released: dict[Place, _Knowledge] = {}

    def times(self, threads: NDArray) -> NDArray:
        """The time of each thread's program."""
        return self._now[threads // self.num_threads]

    def are_ordered(self, earlier: NDArray, times: NDArray, threads: NDArray) -> NDArray:
        """Whether what some threads did at these times happened before what `threads` do now. All have one shape."""
        programs, earlier_programs = threads // self.num_threads, earlier // self.num_threads
        in_program = (programs == earlier_programs) & (times < self._last_barrier[programs])
        ordered = (earlier == threads) | in_program
        for numbers, knowledge in ((programs, self._known), (threads, self._acquired)):
            for number, known in knowledge.items():
                for where in zip(*np.nonzero((numbers == number) & ~ordered), strict=True):
                    is_before = times[where] < known.before[earlier_programs[where]]
                    ordered[where] = is_before or times[where] <= known.own.get(int(earlier[where]), -1)
        return ordered

    def meet(self, threads: NDArray) -> None:
        """All threads of some programs pass a barrier."""
        programs = np.unique(threads // self.num_threads)
        self._now[programs] += 1
        self._last_barrier[programs] = self._now[programs]
        for thread in [thread for thread in self._acquired if thread // self.num_threads in programs]:
            self._knowledge(self._known, thread // self.num_threads).join(self._acquired.pop(thread))

    def _knowledge(self, of: dict, key: int | Place) -> _Knowledge:
        return of.setdefault(key, _Knowledge(np.zeros_like(self._now)))

    def synchronize(self, thread: int, place: Place, *, releases: bool, acquires: bool) -> None:
        """A thread executes an atomic instruction on a place."""
        program = thread // self.num_threads
        published = self._knowledge(self._released, place)
        if acquires:
            self._knowledge(self._acquired, thread).join(published)
        if releases:
            for known in (self._known.get(program), self._acquired.get(thread)):
                if known:
                    published.join(known)
            own = _Knowledge(np.zeros_like(self._now), {thread: int(self._now[program])})
            own.before[program] = self._last_barrier[program]
            published.join(own)
            self._now[program] += 1

    def overwrite(self, place: Place) -> None:
        """A store ends the chain of atomic instructions on a place."""
        self._released.pop(place, None)
