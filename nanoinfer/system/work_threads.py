"""Threads for the work on requests before they reach the engine, in which a small request never waits for a large one.

In: a function, and whether its request is large. Out: its result, in the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from nanoinfer.system.process import return_freed_memory

T = TypeVar("T")
LARGE = 2**16  # bytes of a request, or characters or ids of a prompt, from which on it is large
NUM_SMALL_THREADS = 4
RETURN_SECONDS = 1.0  # from a large request until its memory is given back to the system, together with that of others


class WorkThreads:
    """One thread for large requests, which bounds what they take of memory and the interpreter, and others for small ones."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, "nanoinfer small requests")
        self._large = ThreadPoolExecutor(1, "nanoinfer large requests")
        self._is_return_planned = False

    async def run(self, function: Callable[[], T], *, is_large: bool) -> T:
        """Call a function in a thread. Raises: what it raises."""
        loop = asyncio.get_running_loop()
        if not is_large:
            return await loop.run_in_executor(self._small, function)
        try:
            return await loop.run_in_executor(self._large, function)
        finally:
            if not self._is_return_planned:
                self._is_return_planned = True
                loop.call_later(RETURN_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        self._is_return_planned = False
        with suppress(RuntimeError):  # close() was called meanwhile
            self._large.submit(return_freed_memory)

    def close(self) -> None:
        """Refuse further work. What is running ends."""
        self._small.shutdown(wait=False)
        self._large.shutdown(wait=False)
