"""The stream of one request of an AsyncLLM, and the pace at which the event loop gets what the engine's thread has generated.

In: Deltas. Out: the same Deltas, merged while nobody reads them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.engine.request import Request
from nanoinfer.outputs import CompletionOutput, Delta, RequestOutput, sum_of_logprobs

MAX_HOLD_SECONDS = 0.05  # the most by which merging delays a token
DELIVERY_SHARE = 0.05  # of the time, that the event loop may spend on deliveries before they are merged


class DeliveryPacer:
    """Decides after which steps the event loop gets the new deltas.

    An event costs tens of microseconds in the event loop, and as much in a client on the same machine. With 64 streams and two
    cores that is a large part of a step. So a delivery that would take more than DELIVERY_SHARE of the time since the last one
    waits for the next step, whose tokens then join the same events. With few streams, every step is delivered.
    """

    def __init__(self) -> None:
        self._is_pending = False  # a delivery is scheduled in the event loop
        self._began = 0.0  # when the last one did
        self._cost = 0.0  # seconds of CPU that it took
        self._held_since: float | None = None
        self._last_step = 0.0

    def is_due(self, now: float) -> bool:
        """Whether deltas of a step that has just ended are delivered now. Called by the engine's thread."""
        step_seconds, self._last_step = now - self._last_step, now
        if self._is_pending:
            return False  # it will find them
        if self._held_since is None:
            self._held_since = now
        is_next_too_late = now + step_seconds - self._held_since > MAX_HOLD_SECONDS
        self._is_pending = is_next_too_late or self._cost <= (now - self._began) * DELIVERY_SHARE
        return self._is_pending

    def seconds_left(self, now: float) -> float:
        """Until something is held for too long."""
        return MAX_HOLD_SECONDS if self._held_since is None else self._held_since + MAX_HOLD_SECONDS - now

    def begin(self, now: float) -> None:
        """A delivery begins. This and finish() are called in the event loop."""
        self._is_pending, self._held_since, self._began = False, None, now

    def finish(self, cost: float) -> None:
        """The delivery has ended. cost: the seconds of CPU that it took."""
        self._cost = cost


class RequestStream:
    """The deltas of one request: an asynchronous iterator over lists of at most one Delta per answer, each a merger of all that
    has arrived since the last list. output: the RequestOutput, as soon as its last delta was yielded.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        has_news: asyncio.Event,
        on_close: Callable[["RequestStream"], None],
        on_complete: Callable[[], None],
    ) -> None:
        self.prepared = prepared
        self.output: RequestOutput | None = None
        self.is_closed = False
        self.has_begun = False  # its first deltas were published. Used by the engine's thread
        self.request: Request | None = None  # set by the engine's thread
        self._on_close, self._on_complete = on_close, on_complete
        self._waiting: dict[int, Delta] = {}  # by the answer's index
        self._has_news = has_news
        self._is_complete = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[Delta]:
        if self.output is not None or self.is_closed:
            raise StopAsyncIteration
        await self._has_news.wait()
        self._has_news.clear()
        if self.is_closed:
            raise StopAsyncIteration
        return self.take()

    def take(self) -> list[Delta]:
        """Return what __anext__ would yield, or no deltas if there are none now."""
        deltas, self._waiting = [self._waiting[index] for index in sorted(self._waiting)], {}
        self.output = next((delta.output for delta in deltas if delta.output is not None), self.output)
        return deltas

    def close(self) -> None:
        """Abort the request if it is unfinished. A second call does nothing."""
        if not self.is_closed and not self._is_complete:
            self._on_close(self)
        self.is_closed = True
        self._has_news.set()

    def deliver(self) -> list[Delta]:
        """Take the request's new deltas, and return them. Called in the event loop's thread."""
        deltas: list[Delta] = []
        while self.request is not None and self.request.deltas:
            deltas.append(self.request.deltas.popleft())
        if deltas:
            self._waiting = merge(self._waiting, deltas)
            self._has_news.set()
            if deltas[-1].output is not None:
                self._is_complete = True
                self._on_complete()
        return deltas

    def partial_output(self, deltas: list[Delta]) -> RequestOutput:
        """These deltas as a RequestOutput. Log-probabilities of the prompt are in the last one."""
        answers = [
            CompletionOutput(
                index=delta.index,
                text=delta.text,
                token_ids=delta.token_ids,
                cumulative_logprob=sum_of_logprobs(delta.token_ids, delta.logprobs),
                logprobs=delta.logprobs,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                error=delta.error,
            )
            for delta in deltas
        ]
        if self.output is not None:
            return replace(self.output, outputs=answers)
        assert self.request is not None, "it has deltas"
        return RequestOutput(
            self.request.request_id, self.prepared.prompt, self.prepared.prompt_token_ids, answers, False, self.request.metrics
        )


def merge(waiting: dict[int, Delta], deltas: list[Delta]) -> dict[int, Delta]:
    """One delta per answer, by its index: those that wait and new ones."""
    by_index = {index: [delta] for index, delta in waiting.items()}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return {index: _joined(several) for index, several in by_index.items()}


def _joined(deltas: list[Delta]) -> Delta:
    """Successive deltas of one answer as one."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[one for delta in deltas for one in delta.logprobs or ()] or None,
    )
