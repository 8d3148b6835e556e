"""Drafts by the model itself with rounded weights, which reads and writes the model's own KV cache.

In: sequences whose blocks have room for the drafts. Out: draft token ids. A step of decode takes about the time of reading the
weights, so with 4 bits it takes a third. The keys and values of known tokens are the model's own. Those that the drafter writes
are overwritten by the step that checks the drafts, and so are its states.

Source: self-speculative decoding with quantised weights, QSpec, Zhao et al. 2024, https://arxiv.org/abs/2410.11305
"""

from nanoinfer.engine.speculative.twins import Draft, TwinProposer
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


class QuantizedProposer(TwinProposer):
    """Runs the rounded copy of the model in the model's cache. The twin of a sequence has its blocks."""

    def _twin(self, seq: Sequence) -> Sequence:
        twin = self._twins.get(seq) or self._new_twin(seq)
        twin.token_ids, twin.num_computed_tokens, twin.adapter = list(seq.token_ids), seq.num_computed_tokens, seq.adapter
        twin.block_table, twin.more_block_tables = seq.block_table, seq.more_block_tables
        twin.state_slot, twin.state_writes = seq.state_slot, {}
        if seq.state_writes:  # the twin's states go into the slot of the last draft, since the step reads the sequence's own
            *_, slot = seq.state_writes.values()
            twin.state_writes = {twin.num_computed_tokens + 1: slot}
        return twin

    def _plan(self, drafts: list[Draft]) -> StepPlan:
        for draft in drafts:
            twin = draft.twin
            if twin.num_computed_tokens in twin.state_writes:
                twin.state_slot = twin.state_writes[twin.num_computed_tokens]
                twin.state_writes = {twin.num_computed_tokens + 1: twin.state_slot}
        scheduled = tuple(ScheduledSequence(draft.twin, 1) for draft in drafts)
        return StepPlan(scheduled, rows_of(scheduled))
