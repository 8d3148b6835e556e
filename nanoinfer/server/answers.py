"""Answer an HTTP request, as a JSON object or as server-sent events.

In: the endpoint's Reply, whose Answers have a RequestStream for each prompt. Out: a Response. However it ends, and even if it
never starts, the streams are closed, so that the engine frees their blocks.
"""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.errors import TRY_LATER
from nanoinfer.outputs import CompletionOutput, Delta, RequestOutput
from nanoinfer.server.async_llm import AsyncLLM, RequestStream
from nanoinfer.server.errors import ContextLengthError, RequestError, subject, without_paths
from nanoinfer.server.protocol import JsonObject

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a response that nobody reads


class Answers:
    """The streams of an HTTP request, a stream with n answers for each prompt. With is_prompt_only they count no tokens."""

    format_field = "structured_outputs"  # the client's field for the format of the answer, for errors

    def __init__(self, n: int, *, is_prompt_only: bool = False, merges: bool = True) -> None:
        """merges: whether the tokens of an answer that are due together become one delta."""
        self.id = uuid.uuid4().hex
        self._n, self._is_prompt_only, self._merges = n, is_prompt_only, merges
        self.streams: list[RequestStream] = []
        self.num_tokens = 0  # of the answers that have ended, and of the deltas that are in events
        self._has_news = asyncio.Event()

    async def submit(self, async_llm: AsyncLLM, prepares: Sequence[Callable[[], PreparedRequest]], *, is_large: bool) -> None:
        """Queue every prompt, or no prompt if any is refused."""
        async_llm.check_capacity(len(prepares) * self._n)
        try:
            for prepare in prepares:
                stream = await async_llm.submit(prepare, self._has_news, num_answers=self._n, is_large=is_large)
                self.streams.append(stream)
                if stream.prepared.error is not None:
                    raise ContextLengthError(stream.prepared.error)
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, RequestStream, Delta]]]:
        """Yield (choice, stream, delta) as they arrive, several at a time."""
        unfinished = dict(enumerate(self.streams))
        while unfinished:
            await self._has_news.wait()
            self._has_news.clear()
            updates = []
            for number, stream in list(unfinished.items()):
                deltas = stream.take(merges=self._merges)
                updates += [(self.choice_index(number, delta.index), stream, delta) for delta in deltas]
                if stream.output is not None:
                    del unfinished[number]
            yield updates

    def choice_index(self, number: int, index: int) -> int:
        """Return an answer's index among all choices. number: the index of its prompt."""
        return number * self._n + index

    async def finished(self) -> list[RequestOutput]:
        """Wait until all answers have ended, and return them if none has failed."""
        async for _ in self:
            pass
        for answer in (answer for output in self.outputs for answer in output.outputs):
            if failure := self.failure_of(answer):
                raise failure
            self.num_tokens += len(answer.token_ids)
        return self.outputs

    @property
    def outputs(self) -> list[RequestOutput]:
        """Return the outputs of the streams that have ended."""
        return [stream.output for stream in self.streams if stream.output is not None]

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage so far."""
        prompt = sum(len(stream.prepared.prompt_token_ids) for stream in self.streams)
        completion = 0 if self._is_prompt_only else self.num_tokens
        cached = sum(stream.request.metrics.num_cached_tokens for stream in self.streams if stream.request is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def failure_of(self, answer: CompletionOutput | Delta) -> RequestError | None:
        """Return the error of a failed answer. OpenAI has no finish_reason for it."""
        message = answer.error or ""
        if answer.finish_reason == "abort":
            return RequestError(503, message or "the request was aborted")
        if answer.finish_reason == "timeout":
            return RequestError(504, message or "the request took longer than its timeout")
        if answer.finish_reason != "error":
            return None
        if subject(message) != "structured_outputs":
            return RequestError(500, without_paths(message or "the engine failed"))
        status = 429 if message.endswith(TRY_LATER) else 400  # the client's grammar has reached a limit
        message = message.replace("structured_outputs", self.format_field, 1)
        return RequestError(status, message, param=self.format_field.partition(".")[0])

    def close(self) -> None:
        """Abort the streams that are unfinished."""
        for stream in self.streams:
            stream.close()


class Reply(ABC):
    """Turns the answers to a request into an endpoint's response."""

    response_format = "response_format"  # its name in the endpoint's bodies

    def __init__(self, n: int = 1, **options: bool) -> None:
        """options: those of Answers."""
        self.answers = Answers(n, **options)

    @abstractmethod
    def whole(self) -> JsonObject:
        """Return the JSON object for answers that have ended."""

    @abstractmethod
    def chunks(self, index: int, stream: RequestStream, delta: Delta) -> Iterable[bytes]:
        """Return the server-sent events for the next delta of the choice with this index, or pieces of them."""

    @abstractmethod
    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that has failed."""

    def end(self) -> bytes:
        """Return the events after all chunks."""
        return b""

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a stream, several at a time."""
        async for updates in self.answers:
            events: list[bytes] = []
            for index, stream, delta in updates:
                if failure := self.answers.failure_of(delta):
                    yield b"".join(events) + self.failure(failure)
                    return
                self.answers.num_tokens += len(delta.token_ids)
                events += self.chunks(index, stream, delta)
            if any(events):
                yield b"".join(events)
        if end := self.end():
            yield end


async def respond_whole(request: Request, answers: Answers, make: Callable[[], Awaitable[Response]]) -> Response:
    """Wait until the answers have ended, and return the response that `make` then makes."""
    with closing(answers):
        outputs = await until_disconnect(request, answers.finished())
    return Response(status_code=CLIENT_CLOSED_REQUEST) if outputs is None else await make()


class EventStream(StreamingResponse):
    """Server-sent events, whose streams are closed however the response ends, even if its generator never started."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._answers):
            await super().__call__(scope, receive, send)


async def until_disconnect(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of work, or cancel it and return None if the client disconnects first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
