"""Drafts by multi-token prediction: an extra layer of the checkpoint reads the model's hidden rows (models/qwen_next.py).

In: sequences. Out: draft token ids. The module computes a draft from the newest token and the hidden row before it, and the
next draft from that draft and its own row. It has a KV cache and a twin of every sequence, like a draft model. The
twin's tokens begin with the sequence's second token, so that token i of the twin goes with the model's row i.

Once the drafts are verified, the module computes again from the model's rows what it computed from its own.
"""

from dataclasses import replace

from nanoinfer.engine.speculative.draft_model import DraftModelProposer
from nanoinfer.execution.executor import StepOutput
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan


class _Twin(Sequence):
    """A sequence without its first token, which still counts for positions, so that the same random numbers are drawn."""

    __slots__ = ()

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


class MTPProposer(DraftModelProposer):
    """Runs the drafter, as a Proposer."""

    twin_class = _Twin
    _sequences: dict[Sequence, Sequence]  # twin that drafts -> its sequence

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return at most limits[i] draft ids for sequences[i], and no ids if the drafter's cache is full."""
        self._sequences = {self._twin(seq): seq for seq in sequences}
        limits = [limit if len(seq.token_ids) > 1 else 0 for seq, limit in zip(sequences, limits, strict=True)]
        drafts = super().propose(sequences, limits)
        for twin, seq in self._sequences.items():
            twin.num_computed_tokens = min(twin.num_computed_tokens, len(seq.token_ids) - 1)
        return drafts

    def _twin(self, seq: Sequence) -> Sequence:
        if (twin := self._twins.get(seq)) is None:
            twin = self._new_twin(seq)
            twin.num_pending_tokens = 1  # stands for the first token, which the twin lacks
        twin.token_ids = seq.token_ids[1:]
        twin.num_computed_tokens = min(twin.num_computed_tokens, max(len(twin.token_ids) - 1, 0))
        return twin

    def _compute(self, plan: StepPlan) -> StepOutput:
        slots = tuple((item.sequence, self._slots(item)) for item in plan.scheduled)
        return super()._compute(replace(plan, hidden_slots=slots))

    def _slots(self, item: ScheduledSequence) -> list[int]:
        """Return the slots of the model's rows that the twin's new tokens follow. []: the newest token is a draft."""
        seq, start = self._sequences[item.sequence], item.sequence.num_computed_tokens
        if start >= len(seq.token_ids) - 1:
            return []
        size = self.block_manager.block_size  # the model's cache has the same block size
        return [seq.block_table[i // size] * size + i % size for i in range(start, start + item.num_new_tokens)]
