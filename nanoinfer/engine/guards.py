"""Guards around every call into an engine, so that an exception or a second caller never leaves it in an inconsistent state.

Process   An engine works until it is closed, and only in the process that made it: torch's threads do not survive a fork.
Thread    During a step, another thread's step() is refused, and its add_request() and abort() wait until the step is over.
Ctrl-C    SIGINT waits until the call is over, because a half-done step would leave blocks that belong to no sequence.
Failure   If a step raises (a user's stage, out of memory), every request is requeued and recomputed.
Aborts    An abort during a step (by a tracer, or by a stream that is garbage collected) takes effect when the step is over.
Flush     Observers that may raise, such as a tracer, do it when the step is over.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import ClassVar

from nanoinfer.errors import NanoinferError

CLOSED = "this LLM was closed, by close() or at the end of its with block; make a new LLM"


class EngineGuard:
    """The guards of one engine. restart: requeues all requests. flush, abort: called after a step, abort with the kept ids."""

    def __init__(self, *, restart: Callable[[], None], flush: Callable[[], None], abort: Callable[..., None]) -> None:
        self._restart, self._flush, self._abort = restart, flush, abort
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._pending_aborts: list[str] = []
        self.is_stepping = False
        self.is_closed = False  # set by LLMEngine.close

    def step(self) -> AbstractContextManager[None]:
        """Guard a step of the scheduler, and restart if it raises. Raises: the errors of exclusive()."""
        return self.exclusive(restarts=True)

    @contextmanager
    def exclusive(self, *, restarts: bool = False) -> Iterator[None]:
        """Guard a step. Raises: NanoinferError in another process, during a step, or if the engine is closed."""
        self._check_usable()
        if self.is_stepping:  # in another thread, or in this one if a tracer calls step()
            raise NanoinferError(
                "step() was called during a step: one thread at a time may use an LLM, and a tracer may not step it. "
                "Use a lock, or give all prompts to one generate()"
            )
        with self._lock, interrupt_deferred():
            self.is_stepping = True
            try:
                yield
            except BaseException:
                if restarts:
                    self._restart()
                raise
            finally:
                try:
                    self._flush()
                finally:
                    self.is_stepping = False
                    pending, self._pending_aborts = self._pending_aborts, []
                    if pending:
                        self._abort(*pending)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Guard any other change of the engine, after the step of another thread. Raises: NanoinferError, as exclusive()."""
        self._check_usable()
        with self._lock, interrupt_deferred():
            yield

    def defer_abort(self, request_ids: tuple[str, ...]) -> bool:
        """If a step is running, keep these ids until its end. Returns whether they were kept."""
        if self.is_stepping:
            self._pending_aborts += request_ids
        return self.is_stepping

    @property
    def is_in_other_process(self) -> bool:
        return os.getpid() != self._pid

    def _check_usable(self) -> None:
        if self.is_closed:
            raise NanoinferError(CLOSED)
        if self.is_in_other_process:
            raise NanoinferError(
                "this LLM was made in another process, and torch's threads do not survive a fork; make it in the child, or "
                "start the child with multiprocessing's 'spawn'"
            )


class _Handler:
    """A SIGINT handler that keeps a signal until `with handler:` ends, and otherwise passes it to the previous handler."""

    active: "ClassVar[_Handler | None]" = None  # the handler of the main thread. None: none is set

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous, self.thread, self.depth = previous, threading.get_ident(), 0
        self.received: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.depth:
            self.received.append((number, frame))
        else:
            self.previous(number, frame)

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.received and not self.depth:
            received, self.received = self.received, []
            self.previous(*received[0])


@contextmanager
def interrupt_handler(*, is_deferred: bool = False) -> Iterator[None]:
    """Replace the main thread's SIGINT handler, process-wide, once for all interrupt_deferred() in the block.

    is_deferred: deliver Ctrl-C when the block ends. False: at once, except in interrupt_deferred().
    """
    previous = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(previous):
        yield  # only the main thread receives signals, and only a Python handler raises an exception
        return
    outer, handler = _Handler.active, _Handler(previous)
    with handler if is_deferred else nullcontext():
        signal.signal(signal.SIGINT, handler)
        _Handler.active = handler
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            _Handler.active = outer


def interrupt_deferred() -> AbstractContextManager[None]:
    """Make a context that delivers Ctrl-C when it ends."""
    handler = _Handler.active
    if handler is not None and handler.thread == threading.get_ident():
        return handler
    return interrupt_handler(is_deferred=True)
