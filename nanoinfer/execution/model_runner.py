"""The tensors of one step -> hidden rows -> logits: copy blocks, run the model, apply the LM head to selected rows.

In: a ForwardBatch. Out: hidden rows, and for some of them logits [num_rows, vocab] in fp32. It handles tensors only, and knows
neither requests nor how tokens are sampled. On a GPU the model's part of a decode step is replayed from a CUDA graph
(decode_graphs.py).
"""

from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.decode_graphs import DecodeGraphs
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.models.registry import Model
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.greedy import GreedyKernel


class ModelRunner:
    """Runs the model.

    Args:
        graphs: replays decode steps. None runs every step eagerly.
        greedy: chooses the tokens of greedy rows. None leaves them to the sampler.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        backend: AttentionBackend,
        graphs: DecodeGraphs | None = None,
        greedy: GreedyKernel | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.graphs = graphs
        self.greedy = greedy

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        """The hidden rows of a step. They are valid until the next forward, which may write to the same memory."""
        if batch.block_copies:
            self.cache.copy_blocks(batch.block_copies)
        if self.graphs is not None and self.graphs.supports(batch):
            return self.graphs.replay(batch, self._run)
        return self._run(batch)

    def compute_logits(
        self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"] | slice
    ) -> Float[Tensor, "num_rows vocab"]:
        """The logits of some hidden rows, in fp32. Pass few rows: 1,000 rows of 151,936 logits take 600 MB."""
        return self.model.compute_logits(hidden[rows]).float()

    def sample(
        self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"], batch: SamplingBatch
    ) -> Int[Tensor, " num_rows"] | None:
        """The sampler's tokens, where they can be chosen in less time than by the sampler. -1: not finite."""
        if self.greedy is None or not self.greedy.supports(batch):
            return None
        return self.greedy(self.model.compute_logits(hidden[rows]))

    def _run(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        attend = self.backend.begin_step(self.cache, batch.attention)
        return self.model(batch.input_ids, batch.positions, attend)
