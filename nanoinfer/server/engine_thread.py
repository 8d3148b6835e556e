"""The thread that owns an engine: it runs commands between two steps, and steps while requests are unfinished.

In: commands, from any thread, which run in their order. Out: the requests with new Deltas, through one callback. It
does not know who reads them (server/async_llm.py).
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.request import Request
from nanoinfer.engine.stopping import Stop
from nanoinfer.errors import first_line, starting_threads

logger = logging.getLogger(__name__)

T = TypeVar("T")
TOGETHER_SECONDS = 0.02  # the most that an idle engine waits for requests that are being prepared
MAX_FAILED_STEPS = 3  # after this many failed steps in a row, the engine is dead


class EngineThread(threading.Thread):
    """The thread of one engine. error: why the engine is dead, in which case every request fails. None: the engine works."""

    def __init__(
        self, load: Callable[[], LLMEngine], publish: Callable[[list[Request]], object], num_coming: Callable[[], int]
    ) -> None:
        """Start the thread, and wait until the engine is loaded. Raises: the errors of `load`.

        `load` is called in the new thread, because CUDA's current device belongs to a thread, and because torch's operators
        start threads of their own for each thread that calls them: in steps with enforce_eager, and while a model is loaded.
        `publish` is called there after a step, with the requests that have new Deltas. `num_coming` is called there before the
        first step of an idle engine, which waits while other requests are being prepared.
        """
        super().__init__(name="nanoinfer engine", daemon=True)
        self.error: str | None = None
        self._load, self._publish, self._num_coming = load, publish, num_coming
        self._loaded: Future[LLMEngine] = Future()
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}  # not yet published as finished
        self._num_failures: Counter[str] = Counter()  # request id -> number of failed steps that contained the request
        self._is_closing = False
        with starting_threads():
            self.start()
        self.engine = self._loaded.result()

    def submit(self, prepared: PreparedRequest, request_id: str) -> None:
        """Queue a request. Its id must differ from those of all requests that were not yet published as finished."""
        self._commands.put(lambda: self._submit(prepared, request_id))

    def abort(self, request_id: str) -> None:
        """Finish a request with finish_reason "abort". Unknown and finished ids are ignored."""
        self._commands.put(lambda: self.engine.abort(request_id))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function between two steps. Returns a Future of its result."""
        future: Future[T] = Future()
        self._commands.put(lambda: _call(function, future))
        return future

    def close(self) -> None:
        """Abort all requests, and let the thread end."""
        self._commands.put(self._close)

    # ---- in the thread

    def run(self) -> None:
        try:
            engine = self.engine = self._load()
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(engine)
        num_failed = 0
        while not self._is_closing:
            try:
                if not engine.num_unfinished:
                    engine.capture_graphs(is_over=lambda: not self._commands.empty())
                    self._commands.get()()  # idle: wait for a command
                    self._wait_for_others()
                while not self._commands.empty():
                    self._commands.get()()
                if engine.num_unfinished:
                    engine.step()
                    num_failed = 0
            except BaseException as error:  # also a panic in a Rust library. Ctrl-C never arrives in this thread
                num_failed += 1
                self._step_failed(error, is_dead=num_failed == MAX_FAILED_STEPS)
            self._publish_news()

    def _wait_for_others(self) -> None:
        """Wait for requests that arrived with the first one, which would otherwise wait for a step of its prompt alone."""
        end = time.monotonic() + TOGETHER_SECONDS
        while self._num_coming() and (left := end - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._commands.get(timeout=left)()

    def _submit(self, prepared: PreparedRequest, request_id: str) -> None:
        refusals = self.engine.refusals.values()  # the engine may have been paused after the request was prepared
        stop = next((Stop("abort", error=str(refusal)) for refusal in refusals), None)
        self._requests[request_id] = self.engine.submit(prepared, request_id=request_id, streaming=True, stop=stop)
        if self.error is not None:
            self.engine.fail(self.error, request_id)

    def _close(self) -> None:
        self.engine.abort(*self._requests)
        self._is_closing = True

    def _step_failed(self, error: BaseException, *, is_dead: bool) -> None:
        """Fail the requests that were in two failed steps, or all requests. The engine computes the others again."""
        logger.exception("a step failed")
        reason = f"{type(error).__name__}: {first_line(error)}"
        self._num_failures.update(self.engine.interrupted_request_ids)
        failing = [request_id for request_id, num in self._num_failures.items() if num > 1]
        if is_dead:
            self.error = f"{MAX_FAILED_STEPS} steps in a row have failed: {reason}"
            failing = list(self._requests)
        self.engine.fail(reason, *failing)

    def _publish_news(self) -> None:
        news = []
        for request in list(self._requests.values()):
            if request.deltas:
                news.append(request)
            if request.output is not None:
                del self._requests[request.request_id]
                self._num_failures.pop(request.request_id, None)
        if news:
            self._publish(news)


def _call(function: Callable[[], T], future: "Future[T]") -> None:
    if future.set_running_or_notify_cancel():  # False if the caller has cancelled the Future
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
