"""A Tracer that keeps every event, and writes them as JSON lines or as an HTML page that replays them."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from nanoinfer.errors import InvalidValueError
from nanoinfer.tracing import viewer
from nanoinfer.tracing.events import Candidate, EngineStarted, Event, Interval, StepScheduled

_EVENTS: dict[str, type] = {event.__name__: event for event in Event.__args__}
_PARTS: dict[str, type] = {"candidates": Candidate, "ruler": Interval}  # fields that hold tuples of these


class Recorder:
    """Keeps every event in order: `LLM(tracer=Recorder())`, then look at `.events`, or let to_html draw them. One for each LLM:
    their requests have the same ids.

    >>> from nanoinfer.tracing import BlocksAllocated
    >>> recorder = Recorder()
    >>> recorder.emit(BlocksAllocated("0", (3, 4)))
    >>> recorder.of(BlocksAllocated)
    [BlocksAllocated(sequence_id='0', blocks=(3, 4))]
    """

    def __init__(self, *, stages: bool = False) -> None:
        """stages: also what every stage of the sampler did, and the draw. The sampler takes its plain way then, which is slower
        and draws the same tokens.
        """
        self.wants_stages = stages
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        """The events of one class."""
        return [event for event in self.events if isinstance(event, kind)]

    def clear(self) -> None:
        """Forget all but what runs here, between two runs of one LLM."""
        self.events = self.of(EngineStarted)[-1:]

    def __repr__(self) -> str:
        return f"Recorder({len(self.events)} events)"

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """One event a line, as {"event": its class, its fields ...}, in UTF-8."""
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(self.events))

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str]) -> "Recorder":
        """The events that to_jsonl wrote.

        Raises: InvalidValueError, naming the line that is no event.
        """
        recorder = cls()
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    recorder.emit(_event(json.loads(line)))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise InvalidValueError(
                        f"line {number} of {os.fspath(path)} is no event that Recorder.to_jsonl wrote: {error!r}"
                    ) from error
        return recorder

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """A page that replays what was recorded: one file, which needs no network and works from a disk.

        It shows what the last LLM did that took this recorder. With stages a token takes some 3 KB of it: record tens of
        requests, not hundreds.

        Raises: InvalidValueError if there is nothing to show.
        """
        starts = [i for i, event in enumerate(self.events) if isinstance(event, EngineStarted)]
        events = self.events[starts[-1] :] if starts else []
        if not any(isinstance(event, StepScheduled) for event in events):
            raise InvalidValueError(
                "there is no step of generate(), stream() or chat() to show (beam search makes steps of its own); give the "
                "recorder to an LLM, LLM(tracer=recorder), generate something, then call to_html(path)"
            )
        with open(path, "w", encoding="utf-8") as file:
            file.write(viewer.page(_rows(events)))


def _rows(events: Iterable[Any]) -> Iterable[dict[str, Any]]:
    return ({"event": type(event).__name__} | asdict(event) for event in events)


def _event(row: dict[str, Any]) -> Any:
    kind = _EVENTS[row["event"]]
    return kind(**{field.name: _value(field.name, row[field.name]) for field in fields(kind)})


def _value(name: str, value: Any) -> Any:
    """JSON's lists are tuples, and what stands in some of them has a class."""
    if isinstance(value, list):
        return tuple(_PARTS[name](**part) for part in value) if name in _PARTS else tuple(value)
    return value
