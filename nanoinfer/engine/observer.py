"""What an engine tells those who watch it, such as metrics and tracing. The engine does not know who they are."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from functools import partial
from typing import TYPE_CHECKING

from nanoinfer.engine.request import Request
from nanoinfer.execution.executor import InFlight, SequenceOutput, StepOutput
from nanoinfer.outputs import Metric
from nanoinfer.scheduling.observer import SchedulingObserver
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from nanoinfer.engine.llm_engine import LLMEngine


class Observer(SchedulingObserver):
    """Sees what happens in an engine. Each method does nothing, until a subclass overrides it.

    During a step only flush may raise, because the other events come in the middle of changes.
    """

    def engine_loaded(self, engine: "LLMEngine", num_parameters: int) -> None: ...
    def request_added(self, request: Request) -> None: ...
    def step_launched(self, plan: StepPlan, previous: InFlight | None) -> None: ...  # just before. previous: not yet collected
    def step_collected(self, plan: StepPlan, output: StepOutput) -> None: ...  # before its first token is appended
    def token_appended(self, request: Request, seq: Sequence) -> None: ...
    def sequence_finished(self, seq: Sequence) -> None: ...  # sometimes called twice
    def request_finished(self, request: Request) -> None: ...
    def step_ended(self, plan: StepPlan, output: StepOutput) -> None: ...  # after its last token was appended
    def engine_closed(self) -> None: ...  # drops what is on the device
    def flush(self) -> None: ...  # the engine's call ends, and raises what this raises
    def metrics_read(self, engine: "LLMEngine", metrics: list[Metric]) -> None: ...  # adds its own to LLM.get_metrics


class Planner(Observer):
    """Plans the steps of an engine, as its scheduler does, until a subclass completes the plans or makes them in less time.

    It receives the engine's events, not those of the scheduler and the block manager.
    """

    needs_tokens = False  # whether all tokens must be known when it plans. A step is then collected before the next one

    def plan(self, scheduler: Scheduler) -> StepPlan:
        return scheduler.schedule()

    def append_unread(
        self, outputs: list[SequenceOutput], requests: Mapping[str, Request], observer: Observer
    ) -> list[SequenceOutput]:
        """Append the tokens that only the end of an answer reads. Returns the outputs that are left. requests: by id."""
        return outputs


NOBODY = Observer()


def together(*observers: Observer) -> Observer:
    """Return an observer that passes each event on to those of the observers that override its method, in their order."""
    passing_on = Observer()
    for event in dir(Observer):
        methods = [getattr(one, event) for one in observers if not event.startswith("_")]
        calls = [method for method in methods if getattr(method, "__func__", method) is not getattr(Observer, event)]
        if calls:
            setattr(passing_on, event, calls[0] if len(calls) == 1 else partial(_tell, calls))
    return passing_on


def _tell(methods: ListLike[Callable[..., None]], *event: object) -> None:
    for method in methods:
        method(*event)
