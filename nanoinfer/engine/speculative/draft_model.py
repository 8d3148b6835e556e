"""Drafts by a smaller model with the same vocabulary.

In: sequences. Out: draft token ids. The draft model has its own Executor and KV cache.
"""

from typing import Any

from nanoinfer.config import SchedulerConfig
from nanoinfer.engine.speculative.twins import Draft, TwinProposer
from nanoinfer.execution.executor import Executor
from nanoinfer.scheduling.block_manager import BlockManager, CacheLayout
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


class DraftModelProposer(TwinProposer):
    """Runs the draft model. config: the engine's SchedulerConfig, which decides how prompts are cut."""

    def __init__(self, executor: Executor[Any], config: SchedulerConfig) -> None:
        super().__init__(executor)
        info = executor.info
        layout = CacheLayout(info.windows, config.chunk_grid)
        self.block_manager = BlockManager(info.num_blocks, info.block_size, enable_prefix_caching=False, layout=layout)
        self._max_model_len = info.max_model_len
        self._config = config

    def forget(self, seq: Sequence) -> None:
        """Free the blocks of the sequence's twin."""
        if (twin := self._twins.pop(seq, None)) is not None:
            self.block_manager.free(twin)

    def _twin(self, seq: Sequence) -> Sequence:
        """Return the twin with the sequence's tokens. Its keys and values stay valid up to the first wrong draft."""
        twin = self._twins.get(seq) or self._new_twin(seq)
        num_equal = twin.num_computed_tokens
        while twin.token_ids[:num_equal] != seq.token_ids[:num_equal]:
            num_equal -= 1
        twin.num_computed_tokens = min(num_equal, len(seq.token_ids) - 1)  # the newest token is computed for its logits
        # This is the only place that frees blocks that windows have left: a rejected draft never goes back before these tokens.
        self.block_manager.cache_finished_blocks(twin, twin.num_computed_tokens)
        twin.token_ids = list(seq.token_ids)
        return twin

    def _plan(self, drafts: list[Draft]) -> StepPlan | None:
        """Plan a step for the twins that fit. A twin that does not fit stops drafting. Returns None if none fits."""
        scheduled: list[ScheduledSequence] = []
        budget = self._config.max_num_batched_tokens
        for draft in drafts:
            twin = draft.twin
            num_new = min(twin.num_new_tokens, self._config.chunk_grid)
            if num_new > 1 and num_new > budget:
                continue
            if twin.num_tokens > self._max_model_len or not self.block_manager.can_allocate(twin, num_new):
                draft.limit = len(draft.token_ids)
                continue
            budget -= num_new if num_new > 1 else 0
            self.block_manager.allocate(twin, num_new)
            scheduled.append(ScheduledSequence(twin, num_new))
        scheduled.sort(key=lambda item: item.num_new_tokens > 1)
        return StepPlan(tuple(scheduled), rows_of(scheduled)) if scheduled else None
