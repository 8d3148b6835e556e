"""The interface between bookkeeping and tensors: an engine passes a step's plan to an Executor and receives sampled tokens.

In: StepPlans. Out: StepOutputs, plain Python. This file imports no torch. LocalExecutor runs the model in this process.
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from nanoinfer.outputs import TokenLogprobs
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine must know about the loaded model and its KV cache.

    max_position_embeddings: the model's limit. max_model_len: the most tokens of a sequence, limited by the cache as well.
    windows: of the cache's KV groups (attention/kv_cache.py).
    num_state_slots: for models whose layers keep a state (attention/states.py). 0: none does.
    """

    vocab_size: int
    max_position_embeddings: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_cache_bytes: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "reference"
    windows: tuple[int | None, ...] = (None,)
    num_state_slots: int = 0


@dataclass(slots=True)  # not frozen: one is made for each row of a step, in a third of the time
class SequenceOutput:
    """What a step returns for one sequence.

    token_ids: the sampled ids, in order. logprobs, masks: one for each of token_ids, if requested.
    With StepPlan.num_top_logprobs there are no token_ids, and one entry in logprobs.
    error: why no token could be sampled.
    """

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    masks: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from `position` on."""

    sequence: Sequence
    position: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """sequences: in the order of the plan's rows. seconds: the executor's phases of StepTimed."""

    sequences: list[SequenceOutput]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class InFlight(Protocol):
    """A launched step whose output has not been collected."""

    @property
    def plan(self) -> StepPlan: ...
    @property
    def must_sync(self) -> bool: ...  # whether the sampled tokens must reach the host before the next step is launched


Step = TypeVar("Step", bound=InFlight)


class Executor(Protocol[Step]):
    """Computes steps. If a call raises during LLMEngine.step, every request is requeued and computed again."""

    @property
    def info(self) -> ExecutorInfo: ...
    @property
    def batch_independent(self) -> bool: ...  # see LLM.batch_independent

    def launch(self, plan: StepPlan, previous: Step | None) -> Step:
        """Start a step: batch, block copies, forward pass, LM head, sampling. It waits for the device only if
        prompt log-probabilities or num_top_logprobs are requested.

        previous: the step in flight, or None. Its sampled tokens may be input of this step before the host knows them.
        """
        ...

    def collect(self, step: Step) -> StepOutput: ...  # waits for a step's sampled tokens
