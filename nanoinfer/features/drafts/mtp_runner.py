"""What multi-token prediction adds to the runners: the model's hidden rows are kept for the module that drafts from them.

In: steps of the model, then steps of its drafter (models/qwen_next.py). Out: the drafter's hidden rows. The model's rows are
kept in slots like keys and values, so they are there after a prefix hit, and a step that writes a token's slot writes its row.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner, RunnerWrapper, begin_step
from nanoinfer.execution.runtime import Runtime
from nanoinfer.loading.loaded_weights import LoadedWeights
from nanoinfer.scheduling.sequence import Sequence


class HiddenCache:
    """The hidden rows of a model, [num_blocks, block_size, hidden], with a row for each slot of its cache."""

    rows: Tensor


def with_drafter(runtime: Runtime, drafter: Any) -> tuple[Runtime, Runtime]:
    """Return the runtime of a model that keeps its hidden rows, and that of its drafter, which shares the embedding and LM
    head.
    """
    drafter.target, kept = (runtime.model,), HiddenCache()
    draft = replace(
        runtime,
        model=drafter,
        sizes=CacheSizes.of(drafter.config),
        weights=LoadedWeights(),
        wrappers=(partial(DrafterRunner, kept=kept),),
    )
    wrappers = *runtime.wrappers, partial(KeepingRunner, kept=kept)
    kept_bytes = runtime.model.config.hidden_size * runtime.dtype.itemsize
    return replace(runtime, wrappers=wrappers, kept_bytes_per_token=kept_bytes), draft


class KeepingRunner(RunnerWrapper):
    """Keeps the hidden row of each slot of the cache."""

    def __init__(self, inner: ModelRunner, kept: HiddenCache) -> None:
        super().__init__(inner)
        weight = next(iter(self.model.parameters()))
        sizes = self.cache.num_blocks, self.cache.block_size, self.model.config.hidden_size
        kept.rows = self._kept = torch.zeros(sizes, dtype=weight.dtype, device=weight.device)
        self.cache.attached.append(self._kept)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        for source, target in batch.block_copies:
            self._kept[target] = self._kept[source]
        hidden = super().forward(batch)
        self._kept.flatten(0, 1)[batch.attention.slot_mapping] = hidden
        return hidden


class DrafterRunner(RunnerWrapper):
    """The runner of a drafter, whose forward pass has an extra argument: the hidden row before each token."""

    def __init__(self, inner: ModelRunner, kept: HiddenCache) -> None:
        super().__init__(inner)
        self._kept = kept
        # Each sequence of the next step, with the slots of the model's rows that its tokens follow. An empty list: its token
        # follows the drafter's own row of the previous step.
        self.hidden_slots: list[tuple[Sequence, list[int]]] = []
        self._latest: dict[Sequence, Tensor] = {}  # each sequence's row of the previous step

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        kept = self._kept.rows.flatten(0, 1)
        before = torch.cat([kept[slots] if slots else self._latest[seq] for seq, slots in self.hidden_slots])
        attend = begin_step(self.backend, self.cache, batch)
        hidden = self.model(batch.input_ids, batch.positions, attend, before)  # type: ignore[call-arg]
        ends = batch.attention.query_start_loc_cpu[1:]
        self._latest = {seq: hidden[end - 1 : end] for (seq, _), end in zip(self.hidden_slots, ends, strict=True)}
        return hidden
