"""A Recorder for a long-running process, such as a server: it keeps the newest events, and shows a request's steps."""

from itertools import accumulate, takewhile

from nanoinfer.features.tracing import viewer
from nanoinfer.features.tracing.events import (
    BatchBuilt,
    BlockCopied,
    BlocksForked,
    EngineStarted,
    Event,
    RequestAdded,
    RequestFinished,
    SomeBlocks,
    StepScheduled,
    StepTimed,
)
from nanoinfer.features.tracing.recorder import Recorder, rows

MAX_SIZE = 100_000  # 250 to 500 steps of 64 sequences, or 8,000 to 16,000 steps of one sequence, 20 to 40 MB

_LONG_FIELDS = {RequestAdded: "prompt_token_ids", StepScheduled: "sequence_ids", BatchBuilt: "input_ids"}
_CONTEXT = (RequestAdded, SomeBlocks, BlockCopied, BlocksForked)


class RecentRecorder(Recorder):
    """Keeps the events of the newest steps, and the prompts and blocks of the requests that were unfinished before.

    An event has size 1, plus 1 for each sequence, packed token or prompt token in it. When the size of the steps exceeds
    max_size, the older half is dropped.
    """

    def __init__(self, max_size: int = MAX_SIZE) -> None:
        super().__init__()
        self._max_size = self._limit = max_size
        self._size = 0

    def emit(self, event: Event) -> None:
        super().emit(event)
        self._size += _size_of(event)
        if self._size > self._limit:  # the older half is dropped
            sizes = accumulate(map(_size_of, reversed(self.events)))
            num_kept = sum(1 for _ in takewhile(lambda size: size <= self._max_size // 2, sizes))
            self.events = _with_context(self.events, _next_step(self.events, len(self.events) - num_kept))
            self._size = sum(map(_size_of, self.events))
            self._limit = self._size + self._max_size // 2

    def replay(self, request_ids: list[str]) -> str | None:
        """Return the page that replays some requests, from their first steps to their last. None: no step of them is kept.

        The page shows all sequences of these steps, and opens at the first step of the first request.
        """
        events = list(self.events)  # the engine's thread may add events meanwhile
        wanted = set(request_ids)
        added = [i for i, event in enumerate(events) if isinstance(event, RequestAdded) and event.request_id in wanted]
        if not added:
            return None
        start = _next_step(events, added[0])
        finished = [i for i, event in enumerate(events) if isinstance(event, RequestFinished) and event.request_id in wanted]
        is_over = len(finished) == len(wanted)
        end = _end_of_step(events, finished[-1]) if is_over else len(events)
        steps = [event for event in events[start:end] if isinstance(event, StepScheduled)]
        first = next((event.step for event in steps if wanted & {*event.sequence_ids}), None)
        if first is None:
            return None
        return viewer.page(rows(_with_context(events[:end], start)), at=f"step={first}&token={request_ids[0]}")


def _size_of(event: Event) -> int:
    name = _LONG_FIELDS.get(type(event))
    return 1 if name is None else 1 + len(getattr(event, name))


def _next_step(events: list[Event], index: int) -> int:
    """Return the index of the next StepScheduled, or of the end."""
    return next((i for i in range(index, len(events)) if isinstance(events[i], StepScheduled)), len(events))


def _end_of_step(events: list[Event], index: int) -> int:
    """Return the index after the step that emitted events[index]. An abort's RequestFinished is in no step."""
    for i in range(index, len(events)):
        if isinstance(events[i], StepTimed | StepScheduled):
            return i + isinstance(events[i], StepTimed)
    return len(events)


def _with_context(events: list[Event], start: int) -> list[Event]:
    """Return events[start:] after what explains them: the engine, and the prompts and blocks of unfinished requests."""
    before = events[:start]
    finished = {event.request_id for event in before if isinstance(event, RequestFinished)}

    def is_needed(event: Event) -> bool:
        if not isinstance(event, _CONTEXT):
            return isinstance(event, EngineStarted)
        name = event.request_id if isinstance(event, RequestAdded) else event.sequence_id
        return name.partition(".")[0] not in finished

    return [event for event in before if is_needed(event)] + events[start:]
