"""Run the model on the tensors of a step: copy blocks, compute hidden rows, select the rows that enter the LM head.

In: a ForwardBatch. Out: hidden rows, and some of them with the LM head. It handles tensors only, and does not know
requests or how tokens are sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import Attend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.models.registry import Model
from nanoinfer.sampling.sampler import HeadRows

T = TypeVar("T")
Run = Callable[[ForwardBatch], Tensor]  # computes the hidden rows of a step
BeginStep = Callable[[KVCache, ForwardBatch], Attend]  # makes the Attend of a step


@runtime_checkable
class Replayer(Protocol):
    """Replays the forward pass of some steps, as fast/cuda/graphs.py does with CUDA graphs.

    The KV cache has an extra block, unknown to the scheduler, into which a replay may write.
    """

    # returns the hidden rows of run(batch). None: the caller calls run
    def try_replay(self, batch: ForwardBatch, run: Run) -> Float[Tensor, "num_tokens hidden"] | None: ...

    # captures run of everything that try_replay supports. Returns the tensor that the replays fill, if any run succeeded
    def prepare(self, run: Run) -> Float[Tensor, "max_num_tokens hidden"] | None: ...

    def capture_next(self) -> bool: ...  # captures a step that try_replay lacked. Returns False if there is none
    def drop_graphs(self) -> None: ...  # frees what was captured


@runtime_checkable
class Ranks(Protocol):
    """The ranks that share a model, as one of them sees them (features/distributed)."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor: ...  # returns the tensors of all ranks
    def together(self, capture: Any) -> Any: ...  # returns a capture of CUDA graphs that succeeds on all ranks or on none
    def minimum(self, number: int) -> int: ...  # returns the minimum of the ranks' numbers


class ModelWeights:
    """The weights of a model, wherever they are held. Those of a LoadedWeights can be replaced (features/training).

    shards: the ranks that share the model. None: this process has the whole model.
    """

    shards: Ranks | None = None


@dataclass(eq=False)
class ModelRunner:
    """Runs the model."""

    model: Model
    cache: KVCache
    begin_step: BeginStep  # Runtime.begin_step
    graphs: Replayer | None = None  # replays steps. None: every step runs eagerly
    weights: ModelWeights = field(default_factory=ModelWeights)  # the model's weights, to replace them

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        """Compute the hidden rows of a step. They are valid until the next forward, which may write to the same memory."""
        if batch.block_copies:
            self.cache.copy_blocks(batch.block_copies)
        hidden = None if self.graphs is None else self.graphs.try_replay(batch, self.run)
        return self.run(batch) if hidden is None else hidden

    def head_rows(self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"] | slice) -> HeadRows:
        """Select rows of the last step for the LM head: the batch's logits_indices, or a slice of its packed tokens.

        Select few rows: 1,000 rows of 151,936 logits take 600 MB.
        """
        return HeadRows(hidden[rows], self.model.compute_logits)

    def on_all_ranks(self, function: Callable[..., T], *arguments: object) -> T:
        """Call function(runner, *arguments) here, and on the other ranks that share the model."""
        return function(self, *arguments)

    def run(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        """Launch the model's kernels, one after the other."""
        return self.model(batch.input_ids, batch.positions, self.begin_step(self.cache, batch))


class RunnerWrapper(ModelRunner):
    """Extends the steps of the runner `inner`, for adapters, a drafter or other ranks. Other attributes are `inner`'s."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner.model, inner.cache, inner.begin_step, inner.graphs, inner.weights)
        self.inner = inner

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        return self.inner.forward(batch)

    def head_rows(self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"] | slice) -> HeadRows:
        return self.inner.head_rows(hidden, rows)

    def on_all_ranks(self, function: Callable[..., T], *arguments: object) -> T:
        return self.inner.on_all_ranks(function, *arguments)
