"""Drafts by a smaller model with the same vocabulary.

In: sequences. Out: draft token ids. The draft model has its own Executor and KV cache.
"""

from nanoinfer.config import SchedulerConfig
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.features.drafts.drafter import Draft, DrafterProposer
from nanoinfer.scheduling.block_manager import BlockManager, CacheLayout
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


class DraftModelProposer(DrafterProposer):
    """Runs the draft model. config: the engine's SchedulerConfig, which decides how prompts are cut."""

    def __init__(self, executor: LocalExecutor, config: SchedulerConfig) -> None:
        super().__init__(executor)
        info = executor.info
        layout = CacheLayout(info.windows, config.chunk_grid)
        self.block_manager = BlockManager(info.num_blocks, info.block_size, enable_prefix_caching=False, layout=layout)
        self._max_model_len = info.max_model_len
        self._config = config

    def forget(self, seq: Sequence) -> None:
        """Free the blocks of the sequence's draft sequence."""
        if (draft_seq := self._draft_seqs.pop(seq, None)) is not None:
            self.block_manager.free(draft_seq)

    def _draft_seq(self, seq: Sequence) -> Sequence:
        """Return the draft sequence with the sequence's tokens. Its keys and values stay valid up to the first wrong draft."""
        draft_seq = self._draft_seqs.get(seq) or self._new_draft_seq(seq)
        num_equal = draft_seq.num_computed_tokens
        while draft_seq.token_ids[:num_equal] != seq.token_ids[:num_equal]:
            num_equal -= 1
        draft_seq.num_computed_tokens = min(num_equal, len(seq.token_ids) - 1)  # the newest token is computed for its logits
        # This is the only place that frees blocks that windows have left: a rejected draft never goes back before these tokens.
        self.block_manager.cache_finished_blocks(draft_seq, draft_seq.num_computed_tokens)
        draft_seq.token_ids = list(seq.token_ids)
        return draft_seq

    def _plan(self, drafts: list[Draft]) -> StepPlan | None:
        """Plan a step for the draft sequences that fit. The others stop drafting. Returns None if none fits."""
        scheduled: list[ScheduledSequence] = []
        budget = self._config.max_num_batched_tokens
        for draft in drafts:
            draft_seq = draft.seq
            num_new = min(draft_seq.num_new_tokens, self._config.chunk_grid)
            if num_new > 1 and num_new > budget:
                continue
            if draft_seq.num_tokens > self._max_model_len or not self.block_manager.can_allocate(draft_seq, num_new):
                draft.limit = len(draft.token_ids)
                continue
            budget -= num_new if num_new > 1 else 0
            self.block_manager.allocate(draft_seq, num_new)
            scheduled.append(ScheduledSequence(draft_seq, num_new))
        scheduled.sort(key=lambda item: item.num_new_tokens > 1)
        return StepPlan(tuple(scheduled), rows_of(scheduled)) if scheduled else None
