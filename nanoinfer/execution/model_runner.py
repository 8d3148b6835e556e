"""The tensors of one step -> hidden rows -> logits: carry out the copies owed, run the model, head the rows that are wanted.

In: a ForwardBatch. Out: hidden rows, and for some of them logits [num_rows, vocab] in fp32. It knows tensors, and
neither requests nor how tokens are chosen.

On a GPU the model's part of a decode step is replayed from a recording (cuda_graphs.py). That reads and writes the same memory
each time, so each step's tensors are copied into places that never move, and padding rows read and write a block of their own,
which no sequence ever has.
"""

from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.decode_graphs import DecodeGraphs
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.models.registry import Model


class ModelRunner:
    """graphs: how decode steps are replayed; None runs every step as it comes."""

    def __init__(self, model: Model, cache: KVCache, backend: AttentionBackend, graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.graphs = graphs

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        """The hidden rows stay as they are until the next forward."""
        if batch.block_copies:
            self.cache.copy_blocks(batch.block_copies)
        if self.graphs is not None and self.graphs.covers(batch):
            return self.graphs.replay(batch, self._run)
        return self._run(batch)

    def compute_logits(self, hidden: Float[Tensor, "num_rows hidden"]) -> Float[Tensor, "num_rows vocab"]:
        """Call it with few rows: 1,000 of them over 151,936 ids are 600 MB."""
        return self.model.compute_logits(hidden).float()

    def _run(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        attend = self.backend.begin_step(self.cache, batch.attention)
        return self.model(batch.input_ids, batch.positions, attend)
