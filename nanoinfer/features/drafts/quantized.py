"""Drafts by the model itself with rounded weights, which reads and writes the model's own KV cache.

In: sequences whose blocks have room for the drafts. Out: draft token ids. A step of decode takes about the time of reading the
weights, so with 4 bits it takes a third. The keys and values of known tokens are the model's own. Those that the drafter writes
are overwritten by the step that checks the drafts, and so are its states.

Source: self-speculative decoding with quantised weights, QSpec, Zhao et al. 2024, https://arxiv.org/abs/2410.11305
"""

from nanoinfer.features.drafts.draft_model import Draft, DrafterProposer
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


class QuantizedProposer(DrafterProposer):
    """Runs the rounded copy of the model in the model's cache. The draft sequence of a sequence has its blocks."""

    def _draft_seq(self, seq: Sequence) -> Sequence:
        draft_seq = self._draft_seqs.get(seq) or self._new_draft_seq(seq)
        draft_seq.token_ids, draft_seq.adapter = list(seq.token_ids), seq.adapter
        draft_seq.num_computed_tokens = seq.num_computed_tokens
        draft_seq.block_table, draft_seq.more_block_tables = seq.block_table, seq.more_block_tables
        draft_seq.state_slot, draft_seq.state_writes = seq.state_slot, {}
        if seq.state_writes:  # into the slot of the last draft, since the step reads the sequence's own
            *_, slot = seq.state_writes.values()
            draft_seq.state_writes = {draft_seq.num_computed_tokens + 1: slot}
        return draft_seq

    def _plan(self, drafts: list[Draft]) -> StepPlan:
        for draft in drafts:
            draft_seq = draft.seq
            if draft_seq.num_computed_tokens in draft_seq.state_writes:
                draft_seq.state_slot = draft_seq.state_writes[draft_seq.num_computed_tokens]
                draft_seq.state_writes = {draft_seq.num_computed_tokens + 1: draft_seq.state_slot}
        scheduled = tuple(ScheduledSequence(draft.seq, 1) for draft in drafts)
        return StepPlan(scheduled, rows_of(scheduled))
