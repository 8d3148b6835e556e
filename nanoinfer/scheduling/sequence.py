"""One sequence: its token ids, the number of cached tokens, the blocks that hold them, and its status.

Each field's comment names its only writer.
"""

import copy
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Self

from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy import ndarray

    from nanoinfer.execution.executor import PromptReader
    from nanoinfer.outputs import FinishReason
    from nanoinfer.scheduling.step_plan import ScheduledSequence


class SequenceStatus(Enum):
    PENDING = "pending"  # a further answer (n > 1) to a prompt that has not been computed yet
    WAITING = "waiting"  # new or preempted: it holds no block
    RUNNING = "running"
    FINISHED = "finished"


class Constraint:
    """What limits the tokens of an answer, as a parameter of its request asks (features/). A subclass says what it limits."""

    has_mask = False  # whether write_forbidden is called before each token

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow. EOS then comes next, also before min_tokens. Without EOS the answer ends there."""
        return False

    @property
    def error(self) -> str | None:
        """Why the constraint cannot be followed further. None: it can."""
        return None

    def copy(self) -> Self:
        """Return a copy for one of the request's answers."""
        return copy.copy(self)

    def advance(self, token_id: int) -> "FinishReason | None":
        """Append a token that did not end the answer by its id. Returns the reason if the answer ends with it."""
        return None

    def entries(self, seq: "Sequence", index: int) -> Mapping[str, Iterable[int]]:
        """Return the ids of fields of SamplingBatch (sampling/batch.py), for the token at this index of the answer."""
        return {}

    def write_forbidden(self, forbidden: "ndarray", stop_ids: Iterable[int]) -> None:
        """Write 0 for each id that may follow, and 1 for all others. forbidden: [vocab], uint8, written in place."""

    def num_free(self, index: int) -> int:
        """Return how many tokens after this index of the answer can be sampled before the tokens up to them are known."""
        return 0


@dataclass(eq=False, slots=True)  # eq=False: sequences are compared by identity
class Sequence:
    """A prompt and the tokens generated after it.

    There is no phase flag: a prompt, a chunk of it, a decode step and a recomputation after preemption are all `num_new_tokens`
    tokens that are known and not yet in the cache. A decode step has a single new token.

    >>> seq = Sequence("r0", [5, 6, 7], SamplingParams(), seed=0, max_num_tokens=19)
    >>> seq.num_new_tokens, seq.num_output_tokens
    (3, 0)
    """

    # set once, when the request enters the engine
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_num_tokens: int  # of prompt and output, at which the answer ends with "length"
    eos_token_ids: frozenset[int] = frozenset()
    constraints: tuple[Constraint, ...] = ()  # what limits its tokens. request.py advances them
    reader: "PromptReader | None" = None  # the executor calls it with the prompt's rows, so none is taken from the cache
    is_answered: bool = True  # False: the prompt is only read. The token that ends it is not counted, and no block is cached
    index: int = 0  # the index of this answer among the prompt's n answers
    priority: int = 0  # for schedulers that read priorities. Lower runs first
    arrival_time: float = 0.0  # on the clock of time.perf_counter
    deadline: float = math.inf  # on the same clock: params.timeout after the arrival
    cache_salt: str | None = None  # cached blocks are shared only between sequences with the same salt
    extras: Mapping[str, object] = field(default_factory=dict)  # name -> what a feature reads in the sequence's steps

    token_ids: list[int] = field(init=False)  # prompt + output: the scheduler (beam search writes those of its beams)
    num_tokens: int = field(init=False)  # those of token_ids, and one that is still being sampled: the scheduler
    num_computed_tokens: int = field(default=0, init=False)  # the number of tokens in the cache: the scheduler
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)  # the scheduler
    block_table: list[int] = field(default_factory=list, init=False)  # the block manager
    prefix_keys: list[bytes] = field(default_factory=list, init=False)  # the keys of its full, cached blocks: the block manager
    forks: list["Sequence"] = field(default_factory=list, init=False)  # PENDING: set by the engine, taken by the scheduler
    sampling_state: object = field(default=None, init=False)  # sampling/state.py
    as_decode: "ScheduledSequence | None" = field(default=None, init=False)  # its item in steps with one token: the scheduler

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def sequence_id(self) -> str:
        """The sequence's name in the tracer's events."""
        return f"{self.request_id}.{self.index}" if self.index else self.request_id

    @property
    def needs_all_rows(self) -> bool:
        """Whether a reader needs the prompt's rows: only for the first of n answers, and only once."""
        return self.reader is not None and self.index == 0 and self.num_output_tokens == 0

    @property
    def num_free_tokens(self) -> int:
        """How many tokens after the next can be sampled before the tokens up to them are known.

        0 if the sampling reads the output other than through the logits.
        """
        params = self.params
        if params.has_penalty or params.logits_processors:
            return 0
        if not self.constraints:
            return sys.maxsize
        return min([each.num_free(self.num_tokens - len(self.prompt_token_ids)) for each in self.constraints])

    @property
    def num_new_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def stop_ids(self) -> Iterable[int]:
        """EOS and stop ids, which min_tokens forbids."""
        return self.eos_token_ids.union(self.params.stop_token_ids or ())
