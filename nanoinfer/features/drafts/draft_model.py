"""Drafts by a second model, which runs ahead of the sequence, one token per step.

In: sequences. Out: draft token ids. The drafter has a draft sequence of every sequence: a Sequence with the same parameters and
the same seed. So both models draw with the same random number at the same position, and where their probabilities are close,
they draw the same token at every temperature.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from nanoinfer.config import SchedulerConfig
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.features.hybrid.block_manager import HybridBlockManager
from nanoinfer.features.hybrid.tables import NAME, HybridTables, tables_of
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


@dataclass(slots=True)
class Draft:
    """The draft of one sequence while it grows."""

    seq: Sequence
    limit: int
    token_ids: list[int] = field(default_factory=list)


class DrafterProposer(ABC):
    """Runs a drafter, as a Proposer. Subclasses say which blocks the draft sequences have."""

    draft_seq_class = Sequence

    def __init__(self, executor: LocalExecutor) -> None:
        """executor: computes with the drafter."""
        self._executor = executor
        self._draft_seqs: dict[Sequence, Sequence] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return at most limits[i] draft ids for sequences[i], and no ids if the drafter's cache is full."""
        drafts = [Draft(self._draft_seq(seq), limit) for seq, limit in zip(sequences, limits, strict=True)]
        while running := [draft for draft in drafts if len(draft.token_ids) < draft.limit]:
            if (plan := self._plan(running)) is None:
                break
            step = self._executor.collect(self._executor.launch(plan, None))
            for item in plan.scheduled:
                item.sequence.num_computed_tokens += item.num_new_tokens
            sampled = {output.sequence: output for output in step.sequences}
            for draft in running:
                output = sampled.get(draft.seq)
                if output is not None:
                    draft.seq.token_ids += output.token_ids
                    draft.seq.num_tokens += len(output.token_ids)
                    draft.token_ids += output.token_ids
                # Without an output, some of its tokens are still to be computed, in later steps, so that a long prompt does
                # not delay the other sequences.
                if output is None or output.error:
                    draft.limit = len(draft.token_ids)
        return [draft.token_ids for draft in drafts]

    def forget(self, seq: Sequence) -> None:
        """Drop the draft sequence of a sequence that has ended."""
        self._draft_seqs.pop(seq, None)

    @abstractmethod
    def _draft_seq(self, seq: Sequence) -> Sequence:
        """Return the draft sequence with the sequence's tokens."""

    @abstractmethod
    def _plan(self, drafts: list[Draft]) -> StepPlan | None:
        """Plan the next step of the draft sequences that have a place for it. None: no draft sequence has."""

    def _new_draft_seq(self, seq: Sequence) -> Sequence:
        draft_seq = self._draft_seqs[seq] = self.draft_seq_class(
            seq.request_id, seq.prompt_token_ids, replace(seq.params, logprobs=None), seed=seq.seed,
            max_num_tokens=seq.max_num_tokens, eos_token_ids=seq.eos_token_ids, index=seq.index,
        )  # fmt: skip
        return draft_seq


class DraftModelProposer(DrafterProposer):
    """Runs a smaller model with the same vocabulary, which has its own Executor and KV cache.

    config: the engine's SchedulerConfig, which decides how prompts are cut.
    """

    def __init__(self, executor: LocalExecutor, config: SchedulerConfig) -> None:
        super().__init__(executor)
        info = executor.info
        self.block_manager = HybridBlockManager(
            info.num_blocks, info.block_size, enable_prefix_caching=False, windows=info.windows, chunk_size=config.chunk_grid
        )
        self._max_model_len, self._config = info.max_model_len, config

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
        draft_seq.token_ids, draft_seq.num_tokens = list(seq.token_ids), len(seq.token_ids)
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


class QuantizedProposer(DrafterProposer):
    """Runs the model itself with rounded weights, in the model's own KV cache. The draft sequence of a sequence has its blocks.

    A step of decode takes about the time of reading the weights, so with 4 bits it takes a third. The keys and values of known
    tokens are the model's own. Those that the drafter writes are overwritten by the step that checks the drafts, and so are its
    states.

    Source: self-speculative decoding with quantised weights, QSpec, Zhao et al. 2024, https://arxiv.org/abs/2410.11305
    """

    def _draft_seq(self, seq: Sequence) -> Sequence:
        draft_seq = self._draft_seqs.get(seq) or self._new_draft_seq(seq)
        draft_seq.token_ids, draft_seq.extras = list(seq.token_ids), seq.extras
        draft_seq.num_tokens, draft_seq.num_computed_tokens = seq.num_tokens, seq.num_computed_tokens
        draft_seq.block_table = seq.block_table
        if NAME in seq.extras:
            writes, record = tables_of(seq).state_writes, replace(tables_of(seq), state_writes={})
            if writes:  # into the slot of the last draft, since the step reads the sequence's own
                record.state_writes = {draft_seq.num_computed_tokens + 1: [*writes.values()][-1]}
            draft_seq.extras = {**seq.extras, NAME: record}
        return draft_seq

    def _plan(self, drafts: list[Draft]) -> StepPlan:
        for draft in drafts:
            num_computed_tokens, record = draft.seq.num_computed_tokens, draft.seq.extras.get(NAME)
            if isinstance(record, HybridTables) and num_computed_tokens in record.state_writes:
                record.state_slot = record.state_writes[num_computed_tokens]
                record.state_writes = {num_computed_tokens + 1: record.state_slot}
        scheduled = tuple(ScheduledSequence(draft.seq, 1) for draft in drafts)
        return StepPlan(scheduled, rows_of(scheduled))
