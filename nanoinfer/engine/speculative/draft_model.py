"""Drafts by a smaller model with the same vocabulary, which runs ahead of the sequence, one token per step.

In: sequences. Out: draft token ids. The draft model has its own Executor and KV cache, and a twin of every sequence: a Sequence
with the same parameters and the same seed. So both models draw with the same random number at the same position, and where
their probabilities are close, they draw the same token at every temperature.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from nanoinfer.config import SchedulerConfig
from nanoinfer.execution.executor import Executor, StepOutput
from nanoinfer.scheduling.block_manager import BlockManager, CacheLayout
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


@dataclass(slots=True)
class Draft:
    """The draft of one sequence while it grows."""

    twin: Sequence
    limit: int
    token_ids: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Runs the draft model, as a Proposer. config: the engine's SchedulerConfig, which decides how prompts are cut."""

    twin_class = Sequence

    def __init__(self, executor: Executor[Any], config: SchedulerConfig) -> None:
        info = executor.info
        layout = CacheLayout(info.windows, config.chunk_grid)
        self.block_manager = BlockManager(info.num_blocks, info.block_size, enable_prefix_caching=False, layout=layout)
        self._executor = executor
        self._max_model_len = info.max_model_len
        self._config = config
        self._twins: dict[Sequence, Sequence] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return at most limits[i] draft ids for sequences[i], and no ids if the draft model's cache is full."""
        drafts = [Draft(self._twin(seq), limit) for seq, limit in zip(sequences, limits, strict=True)]
        while running := [draft for draft in drafts if len(draft.token_ids) < draft.limit]:
            if (plan := self._plan(running)) is None:
                break
            step = self._compute(plan)
            for item in plan.scheduled:
                item.sequence.num_computed_tokens += item.num_new_tokens
            sampled = {output.sequence: output for output in step.sequences}
            for draft in running:
                output_of_twin = sampled.get(draft.twin)
                if output_of_twin is not None:
                    draft.twin.token_ids += output_of_twin.token_ids
                    draft.token_ids += output_of_twin.token_ids
                # Without an output, some of its tokens are still to be computed, in later steps, so that a long prompt does
                # not delay the other sequences.
                if output_of_twin is None or output_of_twin.error:
                    draft.limit = len(draft.token_ids)
        return [draft.token_ids for draft in drafts]

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

    def _new_twin(self, seq: Sequence) -> Sequence:
        twin = self._twins[seq] = self.twin_class(
            seq.request_id, seq.prompt_token_ids, replace(seq.params, logprobs=None, prompt_logprobs=None), seed=seq.seed,
            max_num_tokens=seq.max_num_tokens, eos_token_ids=seq.eos_token_ids, index=seq.index,
        )  # fmt: skip
        return twin

    def _compute(self, plan: StepPlan) -> StepOutput:
        return self._executor.collect(self._executor.launch(plan, None))

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
