"""AsyncLLM: an LLM for asyncio, with which any number of coroutines generate at once.

In: prompts and SamplingParams. Out: RequestOutputs, or merged Deltas, as they grow. The server (server/) is built on it.

    event loop                         the engine's thread (server/engine_thread.py)
    submit          -- command -->     queue the request
                                       step, step, step ...
    RequestStreams  <-- one call --    the new Deltas of all requests

Prompts are prepared in other threads (system/worker_threads.py), so that a long prompt delays no other request. Grammars are
compiled in separate threads, so that a request without a grammar never waits for them.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import closing
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import count, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Self, TypeVar

import nanoinfer
from nanoinfer.arguments import arguments_of, check_argument_names
from nanoinfer.config import AsyncEngineArgs, EngineArgs
from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.prompts import PromptType
from nanoinfer.engine.request import Request
from nanoinfer.errors import EngineDeadError, InvalidValueError, NanoinferError, QueueFullError, shown
from nanoinfer.features.adapters.adapters import adapter_of, remove_adapter
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.embedding.pooling import Pooler
from nanoinfer.features.training.methods import refuse_requests
from nanoinfer.llm import LLM
from nanoinfer.outputs import CompletionOutput, Delta, Metric, RequestOutput, sum_of_logprobs
from nanoinfer.sampling_params import RequestOutputKind, SamplingParams
from nanoinfer.server.engine_thread import EngineThread
from nanoinfer.system.worker_threads import LARGE, ThreadPool, WorkerThreads

NUM_GRAMMAR_THREADS = 8  # most only wait, up to MAX_WAIT_SECONDS, for the process that tries new grammars
# An event costs the event loop some 200 microseconds of CPU (AMD EPYC, Zen 3), and a client on the same machine half as much.
# So streams hold tokens for 2 ms each, to deliver them together, which limits the cost to a tenth of the time.
HOLD_SECONDS_PER_STREAM = 0.002
MAX_HOLD_SECONDS = 0.05
POLL_SECONDS = 0.02  # seconds between two checks whether all requests have ended
REFUSAL_SECONDS = 0.25  # the wait before a grammar that has failed is refused again

T = TypeVar("T")


class AsyncLLM:
    """Serves many requests at once from an event loop. The arguments are those of LLM, and two more (AsyncEngineArgs).

    The end of an `async with` block shuts it down.

    >>> async def main():
    ...     async with AsyncLLM("tiny-qwen3") as llm:
    ...         async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=3, temperature=0)):
    ...             text = output.outputs[0].text
    ...     return text
    >>> asyncio.run(main())
    ', there was'
    """

    @arguments_of(AsyncEngineArgs, "AsyncLLM()")
    def __init__(self, args: AsyncEngineArgs) -> None:
        self._streams: dict[str, RequestStream] = {}  # by id, accepted and not yet delivered to the end
        self._unused_ids = map(str, count())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grammar_threads = ThreadPool(NUM_GRAMMAR_THREADS, "nanoinfer grammar")
        self.threads = WorkerThreads()
        self._is_closing = False
        self._freeing = threading.Lock()
        self._streaming = args.streaming
        self.on_finished: Callable[[RequestStream], None] = lambda _: None  # called in the event loop when a request has ended
        self._num_preparing = 0  # accepted requests that were not yet submitted to the engine
        self._is_delivery_planned = False
        self._last_delivery = 0.0  # on the event loop's clock

        def load() -> LLMEngine:
            self.llm = LLM.from_engine_args(args)
            return self.llm.engine

        self._thread = EngineThread(load, self._publish, lambda: self._num_preparing)
        self.engine = self._thread.engine
        self._max_num_answers: int | None = None
        if args.max_num_queued_requests is not None:
            self._max_num_answers = self.engine.scheduler.config.max_num_seqs + args.max_num_queued_requests

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an AsyncLLM from its arguments, as AsyncLLM(...) does, in the way of vLLM."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(engine_args)})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    # ---- requests

    @check_argument_names("generate()")
    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate an answer, and yield RequestOutputs while it grows. Closing the generator aborts the request.

        SamplingParams.output_kind decides what each output holds.

        Args:
            prompt: a prompt, as for LLM.generate.
            sampling_params: the parameters. None: the checkpoint's defaults.
            request_id: a name for abort() that differs from the ids of all unfinished requests. None: a new id.
            lora_request: the adapter of this prompt, with AsyncLLM(enable_lora=True). None: no adapter.
            priority: the priority, with AsyncLLM(scheduling_policy="priority"). Lower runs first. None: 0.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: as in LLM.generate.
            QueueFullError: too many requests are waiting, or too many new grammars.
            EngineDeadError: the engine has failed, or shutdown() was called.
        """
        params = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        num_answers = params.n if isinstance(params, SamplingParams) else 1  # prepare_prompt refuses anything else
        prepare = partial(self.engine.inputs.prepare_prompt, prompt, params, priority=priority, lora_request=lora_request)
        stream = await self.submit(prepare, num_answers=num_answers, request_id=request_id, is_large=is_large_prompt(prompt))
        with closing(stream):
            async for deltas in stream:
                if (output := stream.output_with(deltas)) is not None:
                    yield output

    @cached_property
    def pooler(self) -> Pooler:
        """The Pooler that prepares texts for embeddings and scores, by the checkpoint's files. Raises: as LLM.embed does."""
        return Pooler(self.llm)

    async def submit(
        self,
        prepare: Callable[[], PreparedRequest],
        has_news: asyncio.Event | None = None,
        *,
        num_answers: int,
        request_id: str | None = None,
        is_large: bool = False,
    ) -> "RequestStream":
        """Queue a request, and return its stream, which the caller must close in any case. Raises: the errors of generate.

        Args:
            prepare: called in another thread, returns the request before it is compiled, as InputProcessor.prepare_prompt does.
            has_news: an event that is set when the stream has deltas. Several streams may share it, and be read by take().
            num_answers: the n of the request. Each answer is a sequence, which counts towards the limit.
            request_id: as in generate.
            is_large: whether the request is longer than worker_threads.LARGE, so that small requests must not wait for it.
        """
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise NanoinferError("an AsyncLLM belongs to the event loop of its first request; make one in each asyncio.run()")
        self._loop = loop
        self.check_health()
        self.engine.check_accepting()
        self.check_capacity(num_answers)
        if self._max_num_answers is not None and (num := self.num_unfinished_answers) + num_answers > self._max_num_answers:
            raise QueueFullError(f"{num} answers run or wait, and at most {self._max_num_answers} may; try again later")
        stream = RequestStream(self._checked_id(request_id), num_answers, has_news or asyncio.Event(), self._thread.abort)
        self._streams[stream.request_id] = stream
        self._num_preparing += 1
        try:
            stream.prepared = await self.threads.run(prepare, is_large=is_large)
            try:
                stream.prepared.check()
            except InvalidValueError:  # clients repeat such requests at once, and many in a row would slow the engine's thread
                await asyncio.sleep(REFUSAL_SECONDS)
                raise
            if stream.prepared.compile:
                compile_request = self.engine.inputs.compile
                stream.prepared = await loop.run_in_executor(self._grammar_threads, compile_request, stream.prepared)
            self.check_health()
            self._thread.submit(stream.prepared, stream.request_id)
        except BaseException:
            del self._streams[stream.request_id]
            raise
        finally:
            self._num_preparing -= 1
        if stream.is_closed:  # abort() was called meanwhile
            self._thread.abort(stream.request_id)
        return stream

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read and check an adapter before a request names it. Returns True. Raises: the errors of generate."""
        await self.threads.run(partial(adapter_of, self.engine.inputs, lora_request), is_large=True)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. Running requests keep using it. Returns whether the id was known."""
        return remove_adapter(self.engine.inputs, lora_id)

    async def abort(self, request_id: str) -> None:
        """Finish a request. Its stream ends with finish_reason "abort". Unknown and finished ids are ignored."""
        if stream := self._streams.get(request_id):
            stream.close()

    def _checked_id(self, request_id: str | None) -> str:
        if request_id is None:
            return next(unused for unused in self._unused_ids if unused not in self._streams)
        if not isinstance(request_id, str) or request_id in self._streams:
            raise InvalidValueError(
                f"request_id must be a string that no unfinished request has, got {shown(request_id)}; leave it out to get one"
            )
        return request_id

    # ---- the state of the engine

    @property
    def num_unfinished_answers(self) -> int:
        """The number of answers of accepted requests that were not delivered to the end."""
        return sum(stream.num_answers for stream in self._streams.values())

    def check_health(self) -> None:
        """Check that the engine runs. Raises: EngineDeadError if it is dead or shut down."""
        if self._thread.error is not None:
            raise EngineDeadError(f"the engine is dead: {self._thread.error}; it must be restarted")
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down and accepts no requests")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine's thread has ended; it must be restarted")

    def check_capacity(self, num_answers: int) -> None:
        """Check a number of answers. Raises: InvalidValueError if it cannot be accepted even while nothing runs."""
        if self._max_num_answers is not None and num_answers > self._max_num_answers:
            raise InvalidValueError(
                f"{num_answers} answers are requested, and at most {self._max_num_answers} may run or wait; "
                "use fewer prompts or a smaller n"
            )

    async def get_metrics(self) -> list[Metric]:
        """Return the metrics of LLM.get_metrics, read by the engine's thread between two steps."""
        if self._is_closing or not self._thread.is_alive():
            return await asyncio.to_thread(self.engine.get_metrics)
        return await self.between_steps(self.engine.get_metrics)

    async def between_steps(self, function: Callable[[], T]) -> T:
        """Call a function in the engine's thread, such as a method of `llm`, and return its result.

        Raises: EngineDeadError if the thread has ended, or is about to.
        """
        if self._is_closing or not self._thread.is_alive():
            self.check_health()
        return await asyncio.wrap_future(self._thread.call(function))

    async def pause(self, mode: str = "wait") -> None:
        """See LLM.pause. Running requests continue to stream. To resume: `await between_steps(async_llm.llm.resume)`."""
        await self.between_steps(lambda: refuse_requests(self.engine, mode))
        while self.engine.num_unfinished and self._thread.is_alive():
            await asyncio.sleep(POLL_SECONDS)

    def shutdown(self, timeout: float | None = 0.0) -> "asyncio.Task[None]":
        """Refuse new requests, wait for unfinished requests, abort those that take longer, and close the LLM.

        It begins at once, even if the returned task is not awaited, as in scripts for vLLM. Call it in an event loop.
        timeout: the seconds to wait. None: no limit.
        """
        self._is_closing = True
        task = asyncio.get_running_loop().create_task(self._shut_down(timeout))
        task.add_done_callback(lambda task: self._free() if task.cancelled() else None)  # the loop ends, and nobody awaits it
        return task

    async def _shut_down(self, timeout: float | None) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        while self._streams and self._thread.is_alive() and (timeout is None or clock() - start < timeout):
            await asyncio.sleep(POLL_SECONDS)
        try:  # asyncio's own pool would not do: asyncio.run() starts another thread to end it
            await self.threads.run(self._free, is_large=False)  # meanwhile the last deltas are delivered
        except RuntimeError:  # no thread can be started, or an earlier call has closed the threads
            self._free()

    def _free(self) -> None:
        with self._freeing:
            self._thread.close()
            self._thread.join()
            self._grammar_threads.shutdown(wait=False)
            self.threads.close()
            self.llm.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise nanoinfer.missing_attribute(self, name)

    # ---- deliveries: the first and the last deltas of a request at once, all others together with later deltas

    def _publish(self, requests: list[Request]) -> None:
        """Make the event loop deliver the new deltas of these requests. Called by the engine's thread."""
        assert self._loop is not None, "there is a request"
        urgent = []
        for request in requests:
            if stream := self._streams.get(request.request_id):  # without a stream, its last delta has already been delivered
                if request.output is not None or (self._streaming and stream.request is None):
                    urgent.append(stream)
                stream.request = request
        try:
            if urgent:
                self._loop.call_soon_threadsafe(self._deliver, urgent)
            if self._streaming and len(urgent) < len(requests) and not self._is_delivery_planned:
                self._is_delivery_planned = True
                self._loop.call_soon_threadsafe(self._deliver_all)
        except RuntimeError:  # the loop is closed, so nobody reads
            self._thread.close()

    def _deliver_all(self) -> None:
        """Deliver all deltas when it is time."""
        loop = asyncio.get_running_loop()
        due = self._last_delivery + min(HOLD_SECONDS_PER_STREAM * len(self._streams), MAX_HOLD_SECONDS)
        if loop.time() < due:
            loop.call_at(due, self._deliver_all)
            return
        self._last_delivery = loop.time()
        self._is_delivery_planned = False  # set before the deltas are taken, so that later deltas are delivered, too
        self._deliver(list(self._streams.values()))

    def _deliver(self, streams: list["RequestStream"]) -> None:
        for stream in streams:
            if (deltas := stream.deliver()) and deltas[-1].output is not None:
                del self._streams[stream.request_id]
                if stream.prepared.params.structured_outputs:
                    self.threads.return_memory_later()
                self.on_finished(stream)


class RequestStream:
    """The deltas of a request: an asynchronous iterable of lists with at most one Delta per answer, which merges all that
    have arrived since the last list.

    prepared: the request. request: the engine's Request. None: it has no output yet. is_closed: whether close() was called.
    arrival_time: when it was submitted, in seconds of time.time().
    output: the RequestOutput. None: until its last delta was yielded.
    """

    prepared: PreparedRequest

    def __init__(self, request_id: str, num_answers: int, has_news: asyncio.Event, abort: Callable[[str], object]) -> None:
        self.request_id, self.num_answers = request_id, num_answers
        self.request: Request | None = None
        self.output: RequestOutput | None = None
        self.arrival_time = time.time()
        self.is_closed = False
        self._has_news, self._abort = has_news, abort
        self._waiting: list[Delta] = []
        self._so_far: list[Delta] = []  # for cumulative outputs
        self._is_complete = False

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        while self.output is None:
            await self._has_news.wait()
            self._has_news.clear()
            yield self.take()

    def take(self, *, merges: bool = True) -> list[Delta]:
        """Return what the iterator would yield now, or no deltas. merges: whether the deltas of an answer become one."""
        deltas, self._waiting = merged(self._waiting) if merges else self._waiting, []
        self.output = next((delta.output for delta in deltas if delta.output is not None), self.output)
        return deltas

    def close(self) -> None:
        """Abort the request if it is unfinished. The stream then ends with finish_reason "abort"."""
        self.is_closed = True
        if not self._is_complete:  # otherwise another request may have its id by now
            self._abort(self.request_id)

    def deliver(self) -> list[Delta]:
        """Take the request's new deltas from the engine, and return them. Called in the event loop."""
        deltas: list[Delta] = []
        while self.request is not None and self.request.deltas:
            deltas.append(self.request.deltas.popleft())
        if deltas:
            self._waiting += deltas
            self._is_complete = deltas[-1].output is not None
            self._has_news.set()
        return deltas

    def output_with(self, deltas: list[Delta]) -> RequestOutput | None:
        """Return the output that output_kind asks for, made of these and earlier deltas. None: no output is due yet."""
        kind = self.prepared.params.output_kind
        if kind is RequestOutputKind.CUMULATIVE:
            deltas = self._so_far = merged(self._so_far + deltas)
        if self.output is not None and kind is not RequestOutputKind.DELTA:
            return self.output
        return None if kind is RequestOutputKind.FINAL_ONLY else self.partial_output(deltas)

    def partial_output(self, deltas: list[Delta]) -> RequestOutput:
        """Return these deltas as a RequestOutput. The prompt's log-probabilities are in the last output."""
        names = [field.name for field in fields(CompletionOutput) if field.name != "cumulative_logprob"]
        answers = []
        for delta in deltas:
            cumulative = sum_of_logprobs(delta.token_ids, delta.logprobs)
            answers.append(CompletionOutput(**{name: getattr(delta, name) for name in names}, cumulative_logprob=cumulative))
        if self.output is not None:
            return replace(self.output, outputs=answers)
        assert self.request is not None, "it has deltas"
        prompt, prompt_token_ids = self.prepared.prompt, self.prepared.prompt_token_ids
        return RequestOutput(self.request_id, prompt, prompt_token_ids, answers, False, self.request.metrics)


def is_large_prompt(prompt: PromptType) -> bool:
    """Whether this prompt is so large that small prompts must not wait for it."""
    text_or_ids = prompt.get("prompt") or prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    return isinstance(text_or_ids, str | list) and len(text_or_ids) > LARGE


def merged(deltas: list[Delta]) -> list[Delta]:
    """Join successive deltas of the same answer. Returns at most one delta for each answer, in the order of the answers."""
    if len(deltas) == 1:  # nearly always, and two calls less for each event
        return deltas
    answers = groupby(sorted(deltas, key=attrgetter("index")), key=attrgetter("index"))
    return [_joined(list(of_answer)) for _, of_answer in answers]


def _joined(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs or ()] or None,
        sampling_mask=[mask for delta in deltas for mask in delta.sampling_mask or ()] or None,
    )
