"""The events that a Tracer receives, in the order of a token's journey.

An event holds plain numbers and strings, never a tensor and never a live object. observer.py and stage_trace.py make them. Only
an engine with a tracer has them, so running without costs nothing. A tracer whose attribute `wants_stages` is true also
receives StageApplied and TokenDrawn.

The events of a step are emitted when the step has ended, in order. Others follow the load of a model, an abort and a beam
search. An exception of the tracer ends the engine's call. If a stage of the sampler raises, that step emits no StageApplied.

The sequence_id of a request's first answer is the request's id. Further answers (n > 1) append their index: "7", "7.1", "7.2".
A step's TokenAppended events precede its StepTimed. With async_scheduling the next step's StepScheduled may precede both. Beam
search runs its own steps, and emits the block events and BatchBuilt for them.
"""

from dataclasses import dataclass, field

from nanoinfer.config import Tracer as Tracer


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """An engine was constructed. The Recorder's page starts at the last of these events."""

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
    """A request was accepted."""

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    tokens: tuple[str, ...]  # tokens[i] is the text of prompt_token_ids[i] alone. U+FFFD stands for a part of a character
    params: dict[str, object]  # the sampling parameters that differ from their defaults


@dataclass(frozen=True)
class SomeBlocks:
    """Some blocks of the KV cache, and the sequence to which they belong."""

    sequence_id: str
    blocks: tuple[int, ...]  # -1: a block that the window has left
    group: int = field(default=0, repr=False)  # the KV group of their block table, for models with windows


class BlocksShared(SomeBlocks):
    """A prefix cache hit: these blocks already had the keys and values of the sequence's first tokens."""


class BlocksAllocated(SomeBlocks):
    """These blocks were appended to the sequence's block table."""


@dataclass(frozen=True, slots=True)
class BlockCopied:
    """Copy on write: the sequence was about to write into the shared block `source`, and now has a copy in `target`."""

    sequence_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """A free block was removed from the prefix cache, because it is reused for other tokens."""

    block: int


class BlocksCached(SomeBlocks):
    """These blocks are full, and were added to the prefix cache."""


@dataclass(frozen=True, slots=True)
class BlocksForked:
    """A new sequence shares all of its parent's blocks."""

    parent_id: str
    sequence_id: str
    blocks: tuple[int, ...]


class BlocksFreed(SomeBlocks):
    """The sequence released its blocks. Other sequences may still hold some of them."""


class BlocksReleased(SomeBlocks):
    """The sequence continues without these blocks, because they are before its window."""


@dataclass(frozen=True, slots=True)
class StepScheduled:
    """The scheduler chose the sequences of a step."""

    step: int
    sequence_ids: tuple[str, ...]
    num_new_tokens: tuple[int, ...]  # sequence_ids[i] computes num_new_tokens[i] tokens in this step
    running: tuple[str, ...]  # all sequences that hold blocks, whether they run in this step or not
    num_waiting: int
    num_free_blocks: int
    preempted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokensDrafted:
    """Draft tokens were added to a step. The TokenAppended events of the step say how many of them were right."""

    step: int
    sequence_ids: tuple[str, ...]
    draft_token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BatchBuilt:
    """A step is about to be built. A sequence with drafts is repeated for each draft, as a row with a single token."""

    sequence_ids: tuple[str, ...]
    query_start_loc: tuple[int, ...]  # sequence i has the packed tokens query_start_loc[i] .. query_start_loc[i + 1] - 1
    seq_lens: tuple[int, ...]  # the length of each sequence after the step
    input_ids: tuple[int, ...]  # -1 for a token that is only on the device (async_scheduling)
    positions: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    logits_indices: tuple[int, ...]  # the packed tokens whose hidden rows enter the LM head


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token's probability before and after a stage. It is 0 if the token cannot be drawn."""

    token_id: int
    token: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class StageApplied:
    """A stage of the sampler changed the logits of the row from which the token at `position` is drawn.

    The first stage of a row is named "model". Its candidates have the model's probabilities, both before and after. The
    candidates are the most probable tokens before a stage, those after it, and the drawn token, sorted by falling `before`.
    """

    sequence_id: str
    position: int  # in the sequence. 0 is the prompt's first token
    stage: str
    num_left: int  # the number of tokens of the vocabulary that can be drawn after the stage
    entropy: float  # of all probabilities after the stage, in bits
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A token's interval [low, high) of the cumulative probability. Its length is the token's probability."""

    token_id: int
    token: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """A token was drawn by inverse-CDF sampling: u is in the token's interval [low, high).

    `intervals` has the widest intervals and the drawn token's, by token id. The intervals of all other tokens fill the gaps.
    """

    sequence_id: str
    position: int
    token_id: int
    token: str
    u: float | None  # the uniform random number. None: a greedy row takes the most probable token
    low: float
    high: float
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class TokenAppended:
    """A token was appended to a sequence."""

    sequence_id: str
    position: int
    token_id: int
    token: str
    text: str  # the text that this token released
    held: str  # text that is held back, because it may be the beginning of a stop string
    num_held_ids: int  # the number of newest ids that do not form a whole character yet
    finish_reason: str | None  # set, like stop_reason, if this token was the last
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class StepTimed:
    """The time of one step in seconds, by phase, in the order of LLMEngine.step.

    `forward` is the model up to the last layer, `sample` the LM head and the choice of the tokens. A GPU continues after
    `forward` has returned, so there `sample` includes the wait for it. `trace` is what Recorder(stages=True) adds.

    >>> round(StepTimed(step=0, schedule=1, build=2, forward=30, sample=4, advance=3).outside_model_and_sampler)
    6
    """

    step: int
    schedule: float
    build: float
    forward: float
    sample: float
    advance: float  # stop conditions, detokenization
    trace: float = 0.0  # copying and describing the logits after every stage

    @property
    def outside_model_and_sampler(self) -> float:
        return self.schedule + self.build + self.advance


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """All answers of a request have ended. finish_reasons has an entry per answer."""

    request_id: str
    finish_reasons: tuple[str, ...]
    num_output_tokens: int


Event = (
    EngineStarted | RequestAdded
    | BlocksShared | BlocksAllocated | BlockCopied | BlockEvicted | BlocksCached | BlocksForked | BlocksFreed | BlocksReleased
    | StepScheduled | TokensDrafted | BatchBuilt | StageApplied | TokenDrawn | TokenAppended | StepTimed | RequestFinished
)  # fmt: skip
