"""Make events of what an engine tells its observer, and keep them until the user's tracer may raise without harm."""

import os
import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import fields
from itertools import accumulate
from typing import TYPE_CHECKING

from nanoinfer.engine.observer import Observer
from nanoinfer.engine.request import Request
from nanoinfer.execution.executor import InFlight, StepOutput
from nanoinfer.execution.packing import pack
from nanoinfer.features.tracing import events
from nanoinfer.loading.checkpoint import DEFAULT_MODEL
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.observer import Change
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.engine.llm_engine import LLMEngine

CHANGES: dict[Change, Callable[..., events.Event]] = {
    "shared": events.BlocksShared,
    "allocated": events.BlocksAllocated,
    "cached": events.BlocksCached,
    "released": events.BlocksReleased,
    "freed": events.BlocksFreed,
}


class TracingObserver(Observer):
    """Passes events to a tracer when the engine calls flush. tokenizer: writes their texts. None: they have no texts."""

    def __init__(self, tracer: events.Tracer, block_size: int, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer, self.wants_stages = tokenizer, bool(getattr(tracer, "wants_stages", False))
        self.launched = StepPlan(())  # the newest step's
        self.stage_seconds: dict[int, float] = {}  # by the id of a plan, what describing its stages took (stage_trace.py)
        self._tracer, self._block_size = tracer, block_size
        self._events: deque[events.Event] = deque()
        self._preempted: list[Sequence] = []  # since scheduling has begun
        self._unreported: list[Sequence] = []  # preempted in a step that ran nothing. The next StepScheduled names them
        self._num_steps = 0
        self._planned: tuple[int, float] | None = None  # the number of the step to launch, and the seconds of scheduling it
        self._launched: dict[int, tuple[int, float]] = {}  # the same of those in flight, by the id of the plan
        self._start_of_schedule = self._start_of_advance = 0.0

    def emit(self, event: events.Event) -> None:
        self._events.append(event)

    def flush(self) -> None:
        """Emit all events in order, including those that the tracer itself causes. If it raises, the rest is lost."""
        try:
            while self._events:
                self._tracer.emit(self._events.popleft())
        except BaseException:
            self._events.clear()
            raise

    def text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.token_text(token_id)

    # ---- the engine and its requests

    def engine_loaded(self, engine: "LLMEngine", num_parameters: int) -> None:
        model, info, scheduler = engine.config.model or DEFAULT_MODEL, engine.executor.info, engine.config.scheduler
        self.emit(
            events.EngineStarted(
                os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model, num_parameters,
                info.device, info.dtype, info.attention_backend, info.vocab_size, info.num_blocks, info.block_size,
                scheduler.max_num_seqs, scheduler.max_num_batched_tokens, info.max_model_len,
            )
        )  # fmt: skip

    def request_added(self, request: Request) -> None:
        seq, tokenizer = request.sequences[0], self.tokenizer
        ids, text = tuple(seq.prompt_token_ids), ""
        if tokenizer is not None:
            text = tokenizer.decode(seq.prompt_token_ids, skip_special_tokens=False)
        tokens = () if tokenizer is None else tuple(map(tokenizer.token_text, ids))
        self.emit(events.RequestAdded(request.request_id, text, ids, tokens, differing(seq.params)))

    def token_appended(self, request: Request, seq: Sequence) -> None:
        answer, token_id = request.answers[seq.index], seq.token_ids[-1]
        reasons = (answer.stop.finish_reason, answer.stop.stop_reason) if answer.stop else (None, None)
        texts, held = (self.text(token_id), answer.shown, answer.text.held), answer.detokenizer.num_held_ids
        self.emit(events.TokenAppended(seq.sequence_id, len(seq.token_ids) - 1, token_id, *texts, held, *reasons))

    def request_finished(self, request: Request) -> None:
        if (output := request.output) is not None:
            reasons = tuple(str(answer.finish_reason) for answer in output.outputs)
            self.emit(events.RequestFinished(request.request_id, reasons, output.metrics.num_output_tokens))

    # ---- steps

    def scheduling_begun(self) -> None:
        self._start_of_schedule = time.perf_counter()
        self._preempted.clear()  # those that a failed step has requeued

    def sequence_preempted(self, seq: Sequence) -> None:
        self._preempted.append(seq)

    def step_scheduled(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._unreported += self._preempted
        if plan.scheduled:
            self._planned = self._num_steps, time.perf_counter() - self._start_of_schedule
            self._num_steps += 1
            chosen = _names(item.sequence for item in plan.scheduled), tuple(item.num_new_tokens for item in plan.scheduled)
            num_waiting, num_free = len(scheduler.waiting), scheduler.block_manager.num_free_blocks
            running, preempted = _names(scheduler.running), _names(self._unreported)
            self._unreported.clear()
            self.emit(events.StepScheduled(self._planned[0], *chosen, running, num_waiting, num_free, preempted))

    def step_launched(self, plan: StepPlan, previous: InFlight | None) -> None:
        self.launched = plan
        if self._planned is not None:  # else beam search has made the plan
            self._launched[id(plan)], self._planned = self._planned, None
        if drafting := [item for item in plan.scheduled if item.draft_token_ids]:
            drafts = tuple(item.draft_token_ids for item in drafting)
            self.emit(events.TokensDrafted(self._launched[id(plan)][0], _names(item.sequence for item in drafting), drafts))
        packed = pack(plan, self._block_size)
        for seq, index in plan.rows if previous is not None else ():
            if seq.num_tokens > len(seq.token_ids):
                packed.input_ids[index] = -1
        starts, rows = (0, *accumulate(packed.query_lens)), tuple(index for _, index in plan.rows)
        ids, positions, slots = tuple(packed.input_ids), tuple(packed.positions), tuple(packed.slots)
        self.emit(events.BatchBuilt(_names(packed.sequences), starts, tuple(packed.seq_lens), ids, positions, slots, rows))

    def step_collected(self, plan: StepPlan, output: StepOutput) -> None:
        self._start_of_advance = time.perf_counter()

    def step_ended(self, plan: StepPlan, output: StepOutput) -> None:
        advance, trace = time.perf_counter() - self._start_of_advance, self.stage_seconds.pop(id(plan), 0.0)
        number, schedule = self._launched.pop(id(plan))
        seconds = output.seconds | {"sample": output.seconds["sample"] - trace}
        self.emit(events.StepTimed(number, schedule=schedule, **seconds, advance=advance, trace=trace))

    # ---- blocks

    def blocks_changed(self, change: Change, seq: Sequence, blocks: ListLike[int], group: int = 0) -> None:
        if blocks:
            self.emit(CHANGES[change](seq.sequence_id, tuple(blocks), group))

    def blocks_forked(self, parent: Sequence, child: Sequence, blocks: ListLike[int]) -> None:
        self.emit(events.BlocksForked(parent.sequence_id, child.sequence_id, tuple(blocks)))

    def block_copied(self, seq: Sequence, source: int, target: int) -> None:
        self.emit(events.BlockCopied(seq.sequence_id, source, target))

    def block_evicted(self, block: int) -> None:
        self.emit(events.BlockEvicted(block))


def _names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(seq.sequence_id for seq in sequences)


def differing(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from their defaults. Lists and functions are shortened reprs.

    >>> differing(SamplingParams(temperature=0.5, stop="END"))
    {'temperature': 0.5, 'stop': "('END',)"}
    """
    default, plain = SamplingParams(), int | float | str | None
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    changed = {name: value for name, value in given.items() if value != getattr(default, name)}
    return {name: value if isinstance(value, plain) else reprlib.repr(value) for name, value in changed.items()}
