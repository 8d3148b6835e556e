"""The interface between bookkeeping and tensors: an engine passes step plans to an Executor and receives sampled tokens.

In: StepPlans. Out: StepOutputs of plain Python values. This file imports no torch. LocalExecutor runs a model in this process.
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from nanoinfer.outputs import TokenLogprobs
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine must know about the loaded model and its KV cache.

    max_position_embeddings: the model's limit in tokens. max_model_len: the most tokens of a sequence in this cache.
    windows: the windows of the cache's KV groups in tokens (attention/cache_sizes.py).
    num_state_slots: the number of slots for states (attention/states.py). 0: no layer keeps a state.
    num_graph_tokens: the most prompt tokens of a step that may be captured as a CUDA graph.
    num_graph_bytes: the bytes that are kept free for all CUDA graphs of steps.
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
    num_graph_tokens: int = 0
    num_graph_bytes: int = 0


@dataclass(slots=True)  # not frozen, so that making an instance takes a third of the time
class SequenceOutput:
    """The result of a step for one sequence.

    token_ids: the sampled ids, in order. logprobs, masks: an entry for each of token_ids. None: not requested.
    With StepPlan.num_top_logprobs there are no token_ids, and logprobs has a single entry.
    error: why no token could be sampled. None: the tokens were sampled.
    """

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    masks: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of the prompt's tokens from `position` on."""

    sequence: Sequence
    position: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """sequences: the results, in the order of the plan's rows. seconds: how long each phase took, for StepTimed."""

    sequences: list[SequenceOutput]
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class InFlight(Protocol):
    """A launched step whose output has not been collected."""

    @property
    def plan(self) -> StepPlan: ...
    @property
    def must_sync(self) -> bool: ...  # whether the host must have the sampled tokens before the next launch


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

        previous: the step in flight, whose sampled tokens may be input before the host knows them. None: no step is in flight.
        """

    def collect(self, step: Step) -> StepOutput: ...  # waits for a step's sampled tokens
    def capture_next(self) -> bool: ...  # captures a CUDA graph that steps lacked. False: there is none
