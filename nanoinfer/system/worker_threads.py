"""Threads that prepare requests for the engine, such that a small request never waits for a large one.

In: a function, and whether its request is large. Out: its result, in the event loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from nanoinfer.errors import starting_threads
from nanoinfer.system.process import return_freed_memory

T = TypeVar("T")
LARGE = 2**14  # a request is large from this many bytes on, and a prompt from this many characters or ids
NUM_SMALL_THREADS = 4
RETURN_SECONDS = 1.0  # seconds after a large request until freed memory is returned to the system


class ThreadPool(ThreadPoolExecutor):
    """Threads that are started when there is work. Only the first must start: it does the work of the others, too."""

    def _adjust_thread_count(self) -> None:
        with suppress(RuntimeError) if self._threads else starting_threads():
            super()._adjust_thread_count()


class WorkerThreads:
    """A thread for large requests, which limits their memory and use of the interpreter, and several for small requests."""

    def __init__(self) -> None:
        self._small = ThreadPool(NUM_SMALL_THREADS, "nanoinfer small requests")
        self._large = ThreadPool(1, "nanoinfer large requests")
        self._is_return_planned = False

    async def run(self, function: Callable[[], T], *, is_large: bool) -> T:
        """Call a function in a thread. Raises: the function's errors."""
        loop = asyncio.get_running_loop()
        if not is_large:
            return await loop.run_in_executor(self._small, function)
        try:
            return await loop.run_in_executor(self._large, function)
        finally:
            self.return_memory_later()

    def return_memory_later(self) -> None:
        """Return freed memory to the system in a while. Called in the event loop, when a request that takes much has ended."""
        if not self._is_return_planned:
            self._is_return_planned = True
            asyncio.get_running_loop().call_later(RETURN_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        self._is_return_planned = False
        with suppress(RuntimeError):  # close() has been called
            self._large.submit(return_freed_memory)

    def close(self) -> None:
        """Refuse further work. Running work ends normally."""
        self._small.shutdown(wait=False)
        self._large.shutdown(wait=False)
