"""AsyncLLM: an LLM for asyncio. One thread owns the engine, and any number of coroutines generate at once.

In: prompts and SamplingParams. Out: RequestOutputs, or merged Deltas, as they grow. The server (server/) stands on it.

    coroutine                       the engine's thread
    add_request   -- command -->    submit
                                    step, step, step ...
    stream  <-- one call per step --  the new Deltas of all requests (per several steps, if delivering them costs too much)

Prompts are parsed, rendered and tokenised in further threads, so a long prompt delays nobody. Grammars are compiled in threads
of their own, so a request without a grammar never waits for them. Deltas that wait to be read are merged into one per answer,
so a slow reader costs little memory.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

from nanoinfer.engine.inputs import PreparedRequest, PromptType
from nanoinfer.engine.metrics import Metric
from nanoinfer.engine.request_stream import MAX_HOLD_SECONDS, DeliveryPacer, RequestStream, merge
from nanoinfer.errors import EngineDeadError, InvalidValueError, NanoinferError, QueueFullError, first_line
from nanoinfer.llm import LLM
from nanoinfer.outputs import Delta, RequestOutput
from nanoinfer.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Updates = list[tuple[RequestStream, list[Delta]]]  # what one delivery adds to the streams
OutputKind = Literal["cumulative", "delta", "final_only"]
OUTPUT_KINDS = ("cumulative", "delta", "final_only")
NUM_GRAMMAR_THREADS = 8  # most of them wait for the one process that tries new grammars, and give up after MAX_WAIT_SECONDS
MAX_FAILED_STEPS = 3  # in a row: the engine is dead


class AsyncLLM:
    """Serves many requests at once from one event loop.

    >>> async def main():
    ...     llm = AsyncLLM(lambda: LLM("tiny-qwen3"))
    ...     async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=3, temperature=0)):
    ...         text = output.outputs[0].text
    ...     await llm.shutdown()
    ...     return text
    >>> asyncio.run(main())
    ', there was'
    """

    def __init__(
        self, make_llm: Callable[[], LLM], *, max_num_queued_requests: int | None = None, streaming: bool = True
    ) -> None:
        """Load the model, and start the engine's thread. Raises: what make_llm raises.

        Args:
            make_llm: Returns the LLM. It is called in the engine's thread: OpenMP's threads belong to the thread that computes
                first, and with a second team beside them they would not spin (devices/openmp.py).
            max_num_queued_requests: How many requests may wait beside the max_num_seqs that run. One with n answers counts n
                times. None is no limit.
            streaming: False delivers answers when they end, and nothing before. This costs less, for those who read no stream.
        """
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, "nanoinfer grammar")
        self._num_answers = 0  # of requests that are accepted, and not delivered to the end
        self._is_closing = False
        self._pacer = DeliveryPacer()
        self._streaming = streaming
        self._watches_overdue = False
        self._error: str | None = None  # why the engine is dead
        self.on_deliver: Callable[[Updates], None] | None = None  # called in the event loop, once per step
        # used by the engine's thread alone
        self._streams: dict[str, RequestStream] = {}  # of unfinished requests, by id
        self._num_failures: dict[str, int] = {}  # failed steps that a request was in, by id
        self._has_ended = False
        loaded: Future[LLM] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_llm, loaded), name="nanoinfer engine", daemon=True)
        self._thread.start()
        self.llm = loaded.result()
        self.engine = self.llm.engine
        self._limit = None
        if max_num_queued_requests is not None:
            self._limit = self.engine.scheduler.config.max_num_seqs + max_num_queued_requests

    # ---- for coroutines

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate an answer, and yield RequestOutputs while it grows. Closing the generator aborts the request.

        Args:
            prompt: As for LLM.generate, one prompt.
            sampling_params: None is the checkpoint's default.
            output_kind: "cumulative": everything so far. "delta": what is new. "final_only": one output, the finished one.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As LLM.generate does.
            QueueFullError: Too many requests wait already, or too many new grammars.
            EngineDeadError: The engine has failed, or shutdown() was called.
        """
        if output_kind not in OUTPUT_KINDS:
            raise InvalidValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {output_kind!r}")
        stream = await self.add_request(prompt, sampling_params)
        so_far: dict[int, Delta] = {}
        try:
            async for deltas in stream:
                if output_kind != "final_only":
                    so_far = merge(so_far, deltas)
                if stream.output is not None and output_kind != "delta":
                    yield stream.output
                elif output_kind != "final_only":
                    yield stream.partial_output([so_far[index] for index in sorted(so_far)])
                if output_kind == "delta":
                    so_far.clear()
        finally:
            stream.close()

    async def add_request(self, prompt: PromptType, sampling_params: SamplingParams | None = None) -> "RequestStream":
        """Queue a request, and return its stream, which the caller closes whatever happens. Raises: as generate does."""
        params = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        num_answers = params.n if isinstance(params, SamplingParams) else 1  # prepare refuses anything else
        return await self.submit(lambda: self.engine.inputs.prepare_prompt(prompt, params), num_answers=num_answers)

    async def submit(
        self, prepare: Callable[[], PreparedRequest], has_news: asyncio.Event | None = None, *, num_answers: int
    ) -> "RequestStream":
        """Queue what prepare() returns, as add_request does. It runs in a thread of its own, and may raise.

        Args:
            prepare: Leaves the grammar out, as InputProcessor.prepare_prompt does. It is compiled here.
            has_news: Set when the stream has deltas. Several streams may share one, to be read together with take().
            num_answers: The n of the request. Each answer is a sequence, which counts towards the limit.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise NanoinferError("an AsyncLLM belongs to the event loop of its first request; make one in each asyncio.run()")
        self._loop = loop
        self.check_health()
        self.check_capacity(num_answers)
        if self._limit is not None and self._num_answers + num_answers > self._limit:
            raise QueueFullError(f"{self._num_answers} answers run or wait, and at most {self._limit} may; try again later")
        self._num_answers += num_answers
        try:
            prepared = await asyncio.to_thread(prepare)
            self.check_health()
            if prepared.params.structured_outputs is not None:
                prepared = await self._loop.run_in_executor(self._grammar_threads, self.engine.inputs.compile_grammar, prepared)
                self.check_health()
        except BaseException:
            self._num_answers -= num_answers
            raise
        complete = partial(self._complete, num_answers)
        stream = RequestStream(prepared, has_news or asyncio.Event(), on_close=self._close, on_complete=complete)
        self._commands.put(lambda: self._add(stream))
        return stream

    async def abort(self, request_id: str) -> None:
        """End a request. Its stream ends with finish_reason "abort". Unknown and finished ids are ignored."""
        self._commands.put(lambda: self.engine.abort(request_id))

    @property
    def errored(self) -> bool:
        """Whether the engine is dead: MAX_FAILED_STEPS steps in a row have raised."""
        return self._error is not None

    def check_health(self) -> None:
        """Raises: EngineDeadError if the engine is dead or shut down."""
        if self._error is not None:
            raise EngineDeadError(f"the engine is dead: {self._error}; it must be restarted")
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down and accepts no requests")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine's thread has ended; it must be restarted")

    def check_capacity(self, num_answers: int) -> None:
        """Raises: InvalidValueError for more answers than can be accepted even while nothing runs."""
        if self._limit is not None and num_answers > self._limit:
            raise InvalidValueError(
                f"{num_answers} answers are requested, and at most {self._limit} may run or wait; "
                "use fewer prompts or a smaller n"
            )

    async def get_metrics(self) -> list[Metric]:
        """See LLM.get_metrics. They are read by the engine's thread between two steps."""
        if self._is_closing or not self._thread.is_alive():
            return await asyncio.to_thread(self.engine.get_metrics)
        metrics: Future[list[Metric]] = Future()

        def read() -> None:
            if metrics.set_running_or_notify_cancel():  # False: nobody waits for them any more
                metrics.set_result(self.engine.get_metrics())

        self._commands.put(read)
        return await asyncio.wrap_future(metrics)

    async def shutdown(self, timeout: float | None = 0.0) -> None:
        """Refuse new requests, wait for the unfinished ones, abort those that take longer, and end the engine's thread.

        Args:
            timeout: Seconds to wait. None is without limit.
        """
        self._is_closing = True
        clock = asyncio.get_running_loop().time
        start = clock()
        while self._num_answers and self._thread.is_alive() and (timeout is None or clock() - start < timeout):
            await asyncio.sleep(0.02)
        self._commands.put(self._end)
        await asyncio.to_thread(self._thread.join)
        self._grammar_threads.shutdown(wait=False)
        await asyncio.sleep(0)  # the last deltas are delivered

    def _close(self, stream: "RequestStream") -> None:
        """Abort the request of a stream that is not read any more. If it is still on its way to the engine, _add does it."""

        def abort() -> None:
            if stream.request is not None:
                self.engine.abort(stream.request.request_id)

        self._commands.put(abort)

    def _complete(self, num_answers: int) -> None:
        self._num_answers -= num_answers

    def _deliver(self, streams: list[RequestStream]) -> None:
        """Give streams their new deltas."""
        updates = [(stream, deltas) for stream in streams if (deltas := stream.deliver())]
        if updates and self.on_deliver is not None:
            self.on_deliver(updates)
        if not self._watches_overdue:
            self._watches_overdue = True
            self._deliver_overdue()

    def _deliver_all(self, streams: list[RequestStream]) -> None:
        """Give all streams their new deltas, and measure the cost, until the tasks that wait for them have run."""
        loop, cpu_start = asyncio.get_running_loop(), time.thread_time()
        self._pacer.begin(time.perf_counter())
        self._deliver(streams)
        # the tasks run in the next iteration of the loop, and their bytes are sent at its end
        loop.call_soon(loop.call_soon, lambda: self._pacer.finish(time.thread_time() - cpu_start))

    def _deliver_overdue(self) -> None:
        """Deliver what has been held for too long, because the engine's thread is in a long step. While there are requests."""
        self._watches_overdue = bool(self._streams)
        if self._watches_overdue:
            seconds = self._pacer.seconds_left(time.perf_counter())
            if seconds <= 0:
                self._deliver_all(list(self._streams.values()))
                seconds = MAX_HOLD_SECONDS
            asyncio.get_running_loop().call_later(seconds, self._deliver_overdue)

    # ---- in the engine's thread

    def _run(self, make_llm: Callable[[], LLM], loaded: "Future[LLM]") -> None:
        try:
            engine = (llm := make_llm()).engine
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(llm)
        num_failed = 0
        while not self._has_ended:
            try:
                if not engine.num_unfinished:
                    self._commands.get()()  # idle: wait for a command
                while not self._commands.empty():
                    self._commands.get()()
                if engine.num_unfinished:
                    engine.step()
                    num_failed = 0
            except BaseException as error:  # also a panic of a library in Rust. Ctrl-C never arrives in this thread
                num_failed += 1
                self._step_failed(error, is_dead=num_failed == MAX_FAILED_STEPS)
            self._publish()

    def _add(self, stream: "RequestStream") -> None:
        request = stream.request = self.engine.submit(stream.prepared, streaming=True)
        stream.has_begun = not self._streaming  # the first deltas are as urgent as the last
        self._streams[request.request_id] = stream
        if self._error is not None:
            self.engine.fail(self._error, request.request_id)
        elif stream.is_closed:
            self.engine.abort(request.request_id)

    def _end(self) -> None:
        self.engine.abort(*self._streams)
        self._has_ended = True

    def _step_failed(self, error: BaseException, *, is_dead: bool) -> None:
        """Fail the requests that were in two failed steps, or all of them. The engine computes the others again."""
        logger.exception("a step failed")
        reason = f"{type(error).__name__}: {first_line(error)}"
        for request_id in self.engine.interrupted_request_ids:
            self._num_failures[request_id] = self._num_failures.get(request_id, 0) + 1
        failing = [request_id for request_id, num in self._num_failures.items() if num > 1]
        if is_dead:
            self._error = f"{MAX_FAILED_STEPS} steps in a row have failed: {reason}"
            failing = list(self._streams)
        self.engine.fail(reason, *failing)

    def _publish(self) -> None:
        """Pass the new deltas of all requests to the event loop, in one call, when the pacer says so.

        A request's first and last deltas are never held.
        """
        urgent: list[RequestStream] = []
        others: list[RequestStream] = []
        for request_id, stream in list(self._streams.items()):
            assert stream.request is not None
            if stream.request.output is not None:
                del self._streams[request_id]
                self._num_failures.pop(request_id, None)
            if stream.request.deltas:
                is_urgent = stream.request.output is not None or not stream.has_begun
                (urgent if is_urgent else others).append(stream)
                stream.has_begun = True
        is_due = self._pacer.is_due(time.perf_counter()) if others and self._streaming else False
        if not urgent and not is_due:
            return
        assert self._loop is not None
        try:
            if is_due:
                self._loop.call_soon_threadsafe(self._deliver_all, urgent + others)
            else:
                self._loop.call_soon_threadsafe(self._deliver, urgent)
        except RuntimeError:  # the loop is closed, so nobody reads any more
            self._end()
