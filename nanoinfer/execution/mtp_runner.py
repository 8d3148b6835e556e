"""What multi-token prediction needs of the runners: the model's hidden rows, kept for the module that drafts from them.

In: steps of the model, and then of its drafter (models/qwen_next.py). Out: the drafter's hidden rows. The rows of the model are
kept in slots as keys and values are, so they are there after a prefix hit, and who writes a token's slot writes its row.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner, RunnerWrapper, begin_step
from nanoinfer.execution.parts import Parts
from nanoinfer.loading.held_weights import HeldWeights
from nanoinfer.models.registry import Model
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan


def with_drafter(parts: Parts, drafter: Model) -> tuple[Parts, Parts]:
    """Return the parts of a model whose hidden rows are kept, and those of its drafter."""
    num_bytes = parts.model.config.hidden_size * parts.dtype.itemsize
    draft = replace(parts, model=drafter, weights=HeldWeights(), wrappers=(DrafterRunner,), kept_bytes_per_token=num_bytes)
    return parts.wrapped(KeepingRunner), draft


class KeepingRunner(RunnerWrapper):
    """Keeps the hidden row of each slot of the cache. kept: [num_blocks, block_size, hidden]."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner)
        weight = next(iter(self.model.parameters()))
        sizes = self.cache.num_blocks, self.cache.block_size, self.model.config.hidden_size
        self.kept = torch.zeros(sizes, dtype=weight.dtype, device=weight.device)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        for source, target in batch.block_copies:
            self.kept[target] = self.kept[source]
        hidden = super().forward(batch)
        self.kept.flatten(0, 1)[batch.attention.slot_mapping] = hidden
        return hidden


class DrafterRunner(RunnerWrapper):
    """The runner of a drafter, whose forward pass has one more argument: the hidden row before each token."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner)
        self._latest: dict[Sequence, Tensor] = {}  # the row of each sequence of the step before

    @torch.inference_mode()
    def take(self, plan: StepPlan, kept: Tensor, slots: list[list[int]]) -> None:
        """Prepare the next step. slots: where the hidden rows of a sequence's tokens are. []: its row of the step before."""
        rows = [
            kept.flatten(0, 1)[its_slots] if its_slots else self._latest[item.sequence]
            for item, its_slots in zip(plan.scheduled, slots, strict=True)
        ]
        self._plan, self._given = plan, torch.cat(rows)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        attend = begin_step(self.backend, self.cache, batch)
        hidden = self.model(batch.input_ids, batch.positions, attend, self._given)  # type: ignore[call-arg]
        self._latest = {seq: hidden[index : index + 1] for seq, index in self._plan.rows}
        return hidden
