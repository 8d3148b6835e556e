"""The tensors of one step -> hidden rows -> logits: carry out the copies owed, run the model, head the rows that are wanted.

In: a ForwardBatch. Out: hidden rows, and for some of them logits [num_rows, vocab] in fp32. It knows tensors, and neither
requests nor sampling.
"""

from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.forward_batch import ForwardBatch
from nanoinfer.kv_cache import KVCache
from nanoinfer.models import Model


class ModelRunner:
    def __init__(self, model: Model, cache: KVCache, backend: AttentionBackend) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        if batch.block_copies:
            self.cache.copy_blocks(batch.block_copies)
        attend = self.backend.begin_step(self.cache, batch.attention)
        return self.model(batch.input_ids, batch.positions, attend)

    def compute_logits(self, hidden: Float[Tensor, "num_rows hidden"]) -> Float[Tensor, "num_rows vocab"]:
        """Call it with few rows: 1,000 of them over 151,936 ids are 600 MB."""
        return self.model.compute_logits(hidden).float()
