"""Make events of what an engine tells its observer, and keep them until the user's tracer may raise without harm.

In: sequences, plans, blocks, requests. Out: the events of events.py.
"""

import os
import reprlib
import time
from collections import deque
from collections.abc import Sequence as ListLike
from dataclasses import fields
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from nanoinfer.engine.observer import Observer
from nanoinfer.engine.request import Request
from nanoinfer.execution.executor import InFlight, StepOutput
from nanoinfer.execution.packing import pack
from nanoinfer.features.tracing import events
from nanoinfer.loading.checkpoint import DEFAULT_MODEL
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.pool import NO_BLOCK
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.engine.llm_engine import LLMEngine


class TracingObserver(Observer):
    """Passes events to a tracer when the engine calls flush.

    Attributes:
        tokenizer: writes the texts in the events. None: the events have no texts.
        launched: the plan of the newest step.
        stage_seconds: the seconds that describing a step's stages took, by the number of the step (stage_trace.py).
    """

    def __init__(self, tracer: events.Tracer, block_size: int, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.launched = StepPlan(())
        self.stage_seconds: dict[int, float] = {}
        self._tracer, self._block_size = tracer, block_size
        self._events: deque[events.Event] = deque()
        self._unreported: list[Sequence] = []  # preempted in a step that ran nothing. The next StepScheduled names them
        self._start_of_advance = 0.0

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
                model=os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model,
                num_parameters=num_parameters,
                device=info.device,
                dtype=info.dtype,
                attention_backend=info.attention_backend,
                vocab_size=info.vocab_size,
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_model_len=info.max_model_len,
            )
        )

    def request_added(self, request: Request) -> None:
        seq, text = request.sequences[0], ""
        ids, tokens = tuple(seq.prompt_token_ids), tuple[str, ...]()
        if self.tokenizer is not None:
            text = self.tokenizer.decode(seq.prompt_token_ids, skip_special_tokens=False)
            tokens = tuple(map(self.tokenizer.token_text, ids))
        self.emit(events.RequestAdded(request.request_id, text, ids, tokens, differing(seq.params)))

    def token_appended(self, request: Request, seq: Sequence) -> None:
        answer, token_id = request.answers[seq.index], seq.token_ids[-1]
        self.emit(
            events.TokenAppended(
                seq.sequence_id,
                position=len(seq.token_ids) - 1,
                token_id=token_id,
                token=self.text(token_id),
                text=answer.shown,
                held=answer.text.held,
                num_held_ids=answer.detokenizer.num_held_ids if answer.detokenizer else 0,
                finish_reason=answer.stop.finish_reason if answer.stop else None,
                stop_reason=answer.stop.stop_reason if answer.stop else None,
            )
        )

    def request_finished(self, request: Request) -> None:
        if (output := request.output) is not None:
            reasons = tuple(str(answer.finish_reason) for answer in output.outputs)
            self.emit(events.RequestFinished(request.request_id, reasons, output.metrics.num_output_tokens))

    # ---- steps

    def step_scheduled(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._unreported += plan.preempted
        if not plan.scheduled:
            return
        unreported, self._unreported = self._unreported, []
        self.emit(
            events.StepScheduled(
                step=plan.step,
                sequence_ids=tuple(item.sequence.sequence_id for item in plan.scheduled),
                num_new_tokens=tuple(item.num_new_tokens for item in plan.scheduled),
                running=tuple(seq.sequence_id for seq in scheduler.running),
                num_waiting=len(scheduler.waiting),
                num_free_blocks=scheduler.block_manager.num_free_blocks,
                preempted=tuple(seq.sequence_id for seq in unreported),
            )
        )

    def step_launched(self, plan: StepPlan, previous: InFlight | None) -> None:
        self.launched = plan
        if drafting := [item for item in plan.scheduled if item.draft_token_ids]:
            ids = tuple(item.sequence.sequence_id for item in drafting)
            self.emit(events.TokensDrafted(plan.step, ids, tuple(item.draft_token_ids for item in drafting)))
        on_device = None if previous is None else {seq: row for row, (seq, _) in enumerate(previous.plan.rows)}
        packed = pack(plan, self._block_size, on_device)
        for index in packed.placeholders:
            packed.input_ids[index] = -1
        self.emit(
            events.BatchBuilt(
                sequence_ids=tuple(seq.sequence_id for seq in packed.sequences),
                query_start_loc=(0, *accumulate(packed.query_lens)),
                seq_lens=tuple(packed.seq_lens),
                input_ids=tuple(packed.input_ids),
                positions=tuple(packed.positions),
                slot_mapping=tuple(packed.slots),
                logits_indices=tuple(index for _, index in plan.rows),
            )
        )

    def step_collected(self, plan: StepPlan, output: StepOutput) -> None:
        self._start_of_advance = time.perf_counter()

    def step_ended(self, plan: StepPlan, output: StepOutput) -> None:
        traced, seconds = self.stage_seconds.pop(plan.step, 0.0), output.seconds
        self.emit(
            events.StepTimed(
                plan.step,
                schedule=plan.schedule_seconds,
                build=seconds["build"],
                forward=seconds["forward"],
                sample=seconds["sample"] - traced,
                advance=time.perf_counter() - self._start_of_advance,
                trace=traced,
            )
        )

    # ---- blocks

    def blocks_shared(self, seq: Sequence, blocks: ListLike[int], group: int) -> None:
        self.emit(events.BlocksShared(seq.sequence_id, tuple(blocks), group))

    def blocks_allocated(self, seq: Sequence, blocks: ListLike[int], group: int) -> None:
        self.emit(events.BlocksAllocated(seq.sequence_id, tuple(blocks), group))

    def block_copied(self, seq: Sequence, source: int, target: int) -> None:
        self.emit(events.BlockCopied(seq.sequence_id, source, target))

    def block_evicted(self, block: int) -> None:
        self.emit(events.BlockEvicted(block))

    def blocks_cached(self, seq: Sequence, blocks: ListLike[int]) -> None:
        self.emit(events.BlocksCached(seq.sequence_id, tuple(blocks)))

    def blocks_forked(self, parent: Sequence, child: Sequence, blocks: ListLike[int]) -> None:
        self.emit(events.BlocksForked(parent.sequence_id, child.sequence_id, tuple(blocks)))

    def blocks_freed(self, seq: Sequence) -> None:
        tables = chain(seq.block_table, *seq.more_block_tables)
        if held := tuple(block for block in tables if block != NO_BLOCK):
            self.emit(events.BlocksFreed(seq.sequence_id, held))

    def blocks_released(self, seq: Sequence, blocks: ListLike[int]) -> None:
        self.emit(events.BlocksReleased(seq.sequence_id, tuple(blocks)))


def differing(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from their defaults. Lists and functions are shortened reprs.

    >>> differing(SamplingParams(temperature=0.5, stop="END"))
    {'temperature': 0.5, 'stop': "('END',)"}
    """
    default = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: value if isinstance(value, int | float | str | None) else reprlib.repr(value)
        for name, value in values.items()
        if value != getattr(default, name)
    }
