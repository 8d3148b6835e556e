"""Drafts by multi-token prediction: an extra layer of the checkpoint reads the model's hidden rows (models/qwen_next.py).

In: sequences. Out: draft token ids. The module computes a draft from the newest token and the hidden row before it, and the
next draft from that draft and its own row. It has a KV cache and a draft sequence of every sequence, like a draft model. Its
tokens begin with the sequence's second token, so that its token i goes with the model's row i.

Once the drafts are verified, the module computes again from the model's rows what it computed from its own.
"""

from nanoinfer.features.drafts.draft_model import DraftModelProposer
from nanoinfer.features.drafts.drafter import Draft
from nanoinfer.features.drafts.mtp_runner import DrafterRunner
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan


class _DraftSequence(Sequence):
    """A sequence without its first token, which still counts for positions, so that the same random numbers are drawn."""

    __slots__ = ()

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


class MTPProposer(DraftModelProposer):
    """Runs the drafter, as a Proposer."""

    draft_seq_class = _DraftSequence
    _sequences: dict[Sequence, Sequence]  # draft sequence that drafts -> its sequence

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return at most limits[i] draft ids for sequences[i], and no ids if the drafter's cache is full."""
        self._sequences = {self._draft_seq(seq): seq for seq in sequences}
        limits = [limit if len(seq.token_ids) > 1 else 0 for seq, limit in zip(sequences, limits, strict=True)]
        drafts = super().propose(sequences, limits)
        for draft_seq, seq in self._sequences.items():
            draft_seq.num_computed_tokens = min(draft_seq.num_computed_tokens, len(seq.token_ids) - 1)
        return drafts

    def _draft_seq(self, seq: Sequence) -> Sequence:
        if (draft_seq := self._draft_seqs.get(seq)) is None:
            draft_seq = self._new_draft_seq(seq)
            draft_seq.num_pending_tokens = 1  # stands for the first token, which the draft sequence lacks
        draft_seq.token_ids = seq.token_ids[1:]
        draft_seq.num_computed_tokens = min(draft_seq.num_computed_tokens, max(len(draft_seq.token_ids) - 1, 0))
        return draft_seq

    def _plan(self, drafts: list[Draft]) -> StepPlan | None:
        if (plan := super()._plan(drafts)) is not None:
            assert isinstance(self._executor.runner, DrafterRunner)
            self._executor.runner.hidden_slots = [(item.sequence, self._slots(item)) for item in plan.scheduled]
        return plan

    def _slots(self, item: ScheduledSequence) -> list[int]:
        """Return the slots of the model's rows that the draft sequence's new tokens follow. []: the newest token is a draft."""
        seq, start = self._sequences[item.sequence], item.sequence.num_computed_tokens
        if start >= len(seq.token_ids) - 1:
            return []
        size = self.block_manager.block_size  # the model's cache has the same block size
        return [seq.block_table[i // size] * size + i % size for i in range(start, start + item.num_new_tokens)]
