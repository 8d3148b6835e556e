"""The interface between bookkeeping and tensors: an engine passes step plans to an Executor and receives sampled tokens.

In: StepPlans. Out: StepOutputs of plain Python values. This file imports no torch. LocalExecutor runs a model in this process.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from nanoinfer.outputs import RequestOutput, TokenReport
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import PromptRows, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.sampling.sampler import HeadRows


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the engine must know about the loaded model and its KV cache.

    max_position_embeddings: the model's limit in tokens. max_model_len: the most tokens of a sequence in this cache.
    windows: the windows of the cache's KV groups in tokens (features/hybrid/sizes.py).
    num_state_slots: the number of slots for states (features/hybrid/states.py). 0: no layer keeps a state.
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

    token_ids: the sampled ids, in order. reports: an entry for each of token_ids, or [] if the request asks for none.
    error: why no token could be sampled. None: the tokens were sampled.
    """

    sequence: Sequence
    token_ids: list[int] = field(default_factory=list)
    reports: list[TokenReport] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """sequences: the results, in the order of the plan's rows. seconds: how long each phase took, for StepTimed."""

    sequences: list[SequenceOutput]
    seconds: dict[str, float] = field(default_factory=dict)


class PromptReader:
    """Reads the hidden rows of one prompt (Sequence.reader). features/logprobs/ and features/embedding/ have subclasses."""

    def read(self, executor: "LocalExecutor", hidden: "Tensor", chunk: PromptRows, ends: "HeadRows", row: int | None) -> None:
        """Read the rows of a chunk, which are valid until it returns. After a preemption, reading starts again at position 0.

        ends: the rows that the step samples. row: the index of the prompt's last row in `ends`. None: the prompt is unfinished.
        """

    def complete(self, output: RequestOutput) -> None:
        """Add what was read to the output of the request."""


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
        """Start a step: batch, block copies, forward pass, LM head, sampling. Only a prompt's reader waits for the device.

        If constraints read tokens that are in flight, the sampling starts when the step is collected, or the next is launched.

        previous: the step in flight, whose sampled tokens may be input before the host knows them. None: no step is in flight.
        """

    def collect(self, step: Step) -> StepOutput: ...  # waits for a step's sampled tokens
    def capture_next(self) -> bool: ...  # captures a CUDA graph that steps lacked. False: there is none
