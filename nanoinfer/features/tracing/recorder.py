"""A Tracer that keeps every event, and writes the events as JSON lines or as an HTML page that replays them."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from nanoinfer.errors import InvalidValueError
from nanoinfer.features.tracing import viewer
from nanoinfer.features.tracing.events import EngineStarted, Event, StepScheduled

E = TypeVar("E")

MAX_FRAME_CHARS = 3_000_000  # the limit for a page in a notebook, which saves the page with the cell


class Recorder:
    """Keeps every event in `events`, in order: `LLM(tracer=Recorder())`. Each LLM needs its own, since request ids start at 0.

    >>> from nanoinfer.features.tracing import BlocksAllocated
    >>> recorder = Recorder()
    >>> recorder.emit(BlocksAllocated("0", (3, 4)))
    >>> recorder.of(BlocksAllocated)
    [BlocksAllocated(sequence_id='0', blocks=(3, 4))]
    """

    def __init__(self, *, stages: bool = False) -> None:
        """stages: whether to record StageApplied and TokenDrawn. The sampler is then slower, and gives the same tokens."""
        self.wants_stages = stages
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a class."""
        return [event for event in self.events if isinstance(event, kind)]

    def clear(self) -> None:
        """Remove all events except the last EngineStarted, for another run of the same LLM."""
        self.events = [*self.of(EngineStarted)[-1:]]

    def __repr__(self) -> str:
        return f"Recorder({len(self.events)} events)"

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write an event per line, as {"event": its class, its fields ...}, in UTF-8."""
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(self.events))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that replays the recorded events: a single file, which needs no network and opens from a disk.

        It shows the last LLM that used this recorder. With stages, a token takes about 3 KB.

        Raises:
            InvalidValueError: no step was recorded.
        """
        Path(path).write_text(viewer.page(rows(self._run_to_show())), encoding="utf-8")

    def to_comparison(
        self, path: str | os.PathLike[str], other: "Recorder", *, names: tuple[str, str] = ("this run", "the other run")
    ) -> None:
        """Write a page that replays this run and another run side by side, and marks the tokens that differ.

        The pages are aligned by token or by step. Answers to equal prompts belong together.

        Args:
            names: the names of this run and the other run on the page.

        Raises:
            InvalidValueError: one of the runs has no step.
        """
        page = viewer.comparison_page((rows(self._run_to_show()), rows(other._run_to_show())), names)
        Path(path).write_text(page, encoding="utf-8")

    def _repr_html_(self) -> str | None:
        """Return the page of to_html in a frame for Jupyter. None: no step was recorded, so Jupyter shows repr()."""
        events = self._last_run()
        if not events:
            return None
        if len(events) < MAX_FRAME_CHARS // 50:  # most events take more characters than that
            page = viewer.page(rows(events))
            if len(page) <= MAX_FRAME_CHARS:
                return viewer.frame(page)
        return (
            f"<p>{self!r} makes a page of more than {MAX_FRAME_CHARS / 1e6:.0f} MB, which is too large for a notebook. "
            '<code>recorder.to_html("trace.html")</code> writes it to a file.</p>'
        )

    def _run_to_show(self) -> list[Event]:
        """Return the events of _last_run. Raises: InvalidValueError if it has no step."""
        events = self._last_run()
        if not events:
            raise InvalidValueError(
                "there is no step of generate(), stream() or chat() to show (beam search makes steps of its own); give the "
                "recorder to an LLM, LLM(tracer=recorder), generate something, then write the page"
            )
        return events

    def _last_run(self) -> list[Event]:
        """Return the events from the last EngineStarted on, or none if there is no step among them."""
        starts = [i for i, event in enumerate(self.events) if isinstance(event, EngineStarted)]
        events = self.events[starts[-1] :] if starts else []
        return events if any(isinstance(event, StepScheduled) for event in events) else []


def rows(events: Iterable[Event]) -> Iterable[viewer.Row]:
    """Yield the events as plain dicts: {"event": its class, its fields ...}."""
    return ({"event": type(event).__name__} | asdict(event) for event in events)
