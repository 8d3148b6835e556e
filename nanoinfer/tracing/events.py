"""What the engine tells about itself: frozen events, the Tracer that takes them, and a Recorder that keeps them.

Each station is handed the tracer and makes an event only if there is one, so that no tracer costs nothing. Events hold plain
numbers and names, never a tensor and never a live object. In the order of a token's journey:

    EngineStarted      what runs here: model, backend, blocks
    RequestAdded       a prompt, as text and as ids
    BlocksShared, BlocksAllocated, BlockCopied, BlockEvicted, BlocksCached, BlocksForked, BlocksFreed
                       what becomes of the cache's blocks
    StepScheduled      who runs, and how many tokens of each
    BatchBuilt         the step as the model sees it: packed ids, positions, slots
    StageApplied       (asked for by Recorder(stages=True)) what a stage of the sampler did to one row
    TokenDrawn         (likewise) the uniform number, and the interval that it fell in
    TokenAppended      the token, what of its text was let out and what was held back, and whether the sequence ended
    RequestFinished    every answer has ended
    StepTimed          where the step's time went

A sequence_id is its request's id; the second answer to a prompt (n > 1) is "7.1" where the first is "7". A step's TokenAppended
events stand before its StepTimed. With async_scheduling the next step's StepScheduled may stand before both. Beam search makes
steps of its own, and tells of them what becomes of blocks, and BatchBuilt.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class EngineStarted:
    model: str
    num_parameters: int
    device: str
    dtype: str
    attention_backend: str
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """tokens[i] is the text of prompt_token_ids[i] alone; U+FFFD for a piece of a character, which is whole in `prompt`.

    params: the SamplingParams that differ from their defaults.
    """

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BlocksShared:
    """A prefix hit: these blocks held the start of the sequence's tokens already."""

    sequence_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksAllocated:
    sequence_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopied:
    """Copy on write: the sequence was to write into a shared block, and has a copy of its own instead."""

    sequence_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """A free block is taken for something else, and no prefix finds its old content from here on."""

    block: int


@dataclass(frozen=True, slots=True)
class BlocksCached:
    """These blocks are full, and can be found by a prefix from here on."""

    sequence_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksForked:
    """The sequence shares all of its parent's blocks."""

    parent_id: str
    sequence_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """The sequence gave its blocks back. Others may hold some of them still."""

    sequence_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepScheduled:
    """The scheduler decided. sequence_ids[i] computes num_new_tokens[i] tokens this step; running: whoever holds blocks."""

    step: int
    sequence_ids: tuple[str, ...]
    num_new_tokens: tuple[int, ...]
    running: tuple[str, ...]
    num_waiting: int
    num_free_blocks: int
    preempted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchBuilt:
    """The step's tensors. Sequence i has the packed tokens query_start_loc[i] .. query_start_loc[i + 1] - 1, and seq_lens[i]
    tokens after the step. An input id is -1 where the token is known to the device alone (async_scheduling).
    """

    sequence_ids: tuple[str, ...]
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    logits_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token's probability before and after a stage; 0 where it cannot be drawn."""

    token_id: int
    token: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class StageApplied:
    """A stage changed a row's logits, which are for the sequence's token at `position` (0 is the prompt's first).

    The first stage of a row is called "model": what the model said, before = after. candidates: the likeliest before, the
    likeliest after, and the token that was drawn, in falling order of `before`. num_left: how many tokens of the vocabulary can
    be drawn after it.
    """

    sequence_id: str
    position: int
    stage: str
    num_left: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A token's part of the ruler, which is 1 long."""

    token_id: int
    token: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """u fell into [low, high). A greedy row takes the largest: its u is None, and the ruler is what it might have been.

    ruler: the widest intervals and the drawn one, in order of their ids. Between them lie the others.
    """

    sequence_id: str
    position: int
    token_id: int
    token: str
    u: float | None
    low: float
    high: float
    ruler: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class TokenAppended:
    """text: what may be shown from here on. held: what is certain, but may yet become a stop string.

    num_held_ids: newest ids that are no whole character yet. finish_reason and stop_reason: if this token was the last.
    """

    sequence_id: str
    position: int
    token_id: int
    token: str
    text: str
    held: str
    num_held_ids: int
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class StepTimed:
    """Where one step's time went, in seconds, in the order of LLMEngine.step.

    A GPU works on after `forward` has returned: there, `sample` holds the wait for it.

    >>> round(StepTimed(step=0, schedule=1, build=2, forward=30, sample=4, advance=3).outside_model_and_sampler)
    6
    """

    step: int
    schedule: float
    build: float
    forward: float
    sample: float
    advance: float  # stop rules, detokenizing

    @property
    def outside_model_and_sampler(self) -> float:
        return self.schedule + self.build + self.advance


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """finish_reasons: one for each of its answers."""

    request_id: str
    finish_reasons: tuple[str, ...]
    num_output_tokens: int


Event = (
    EngineStarted | RequestAdded
    | BlocksShared | BlocksAllocated | BlockCopied | BlockEvicted | BlocksCached | BlocksForked | BlocksFreed
    | StepScheduled | BatchBuilt | StageApplied | TokenDrawn | TokenAppended | StepTimed | RequestFinished
)  # fmt: skip


@runtime_checkable
class Tracer(Protocol):
    """Takes the engine's events. If it has an attribute wants_stages that is true, the sampler tells its stages, too.

    It is called when a step is over (and when a model was loaded, when requests are aborted, after a beam search) with all that
    happened since, in its order; what it raises ends the call that stepped. A step in which a stage of yours raises has no
    StageApplied.
    """

    def emit(self, event: Any) -> None: ...


class Outbox:
    """Between the stations and a user's tracer: keeps events until the engine is in a state that may be interrupted."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._events: deque[Event] = deque()

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def flush(self) -> None:
        """Hand all over, in order, also what the tracer itself brings about. What it raises ends that, and the rest is lost."""
        try:
            while self._events:
                self._tracer.emit(self._events.popleft())
        except BaseException:
            self._events.clear()
            raise
