"""What the engine tells about itself: frozen events, the Tracer that takes them, and a Recorder that keeps them.

Each station gets the tracer in its constructor and makes an event only if there is one, so that no tracer costs nothing.
Events hold plain numbers and names, never a tensor and never a live object.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class StepScheduled:
    """The scheduler decided. request_ids[i] computes num_new_tokens[i] tokens this step."""

    request_ids: tuple[str, ...]
    num_new_tokens: tuple[int, ...]
    num_waiting: int
    num_free_blocks: int
    preempted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepTimed:
    """Where one step's time went, in seconds, in the order of LLMEngine.step.

    A GPU works on after `forward` has returned: there, `sample` holds the wait for it.

    >>> round(StepTimed(schedule=1, build=2, forward=30, sample=4, advance=3).outside_model_and_sampler)
    6
    """

    schedule: float
    build: float
    forward: float
    sample: float
    advance: float  # commit, stop rules, detokenizing

    @property
    def outside_model_and_sampler(self) -> float:
        return self.schedule + self.build + self.advance


@dataclass(frozen=True, slots=True)
class RequestFinished:
    request_id: str
    finish_reason: str
    num_output_tokens: int


@runtime_checkable
class Tracer(Protocol):
    def emit(self, event: Any) -> None: ...


class Recorder:
    """Keeps every event in order: `LLM(tracer=Recorder())`, then look at `.events`."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)
