"""The tensors of one step -> logits: carry out the copies owed, run the model, head only the rows that are wanted.

In: a ForwardBatch. Out: logits [num_rows, vocab] in fp32. It knows tensors, and neither requests nor sampling.
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

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_rows vocab"]:
        if batch.block_copies:
            self.cache.copy_blocks(batch.block_copies)
        attend = self.backend.begin_step(self.cache, batch.attention)
        hidden = self.model(batch.input_ids, batch.positions, attend)  # [num_tokens, hidden]
        return self.model.compute_logits(hidden[batch.logits_indices]).float()
