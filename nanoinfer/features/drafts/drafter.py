"""Drafts by a second model, which runs ahead of the sequence, one token per step.

In: sequences. Out: draft token ids. The drafter has a draft sequence of every sequence: a Sequence with the same parameters and
the same seed. So both models draw with the same random number at the same position, and where their probabilities are close,
they draw the same token at every temperature.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

from nanoinfer.execution.executor import Executor, StepOutput
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan


@dataclass(slots=True)
class Draft:
    """The draft of one sequence while it grows."""

    seq: Sequence
    limit: int
    token_ids: list[int] = field(default_factory=list)


class DrafterProposer(ABC):
    """Runs a drafter, as a Proposer. Subclasses say which blocks the draft sequences have."""

    draft_seq_class = Sequence

    def __init__(self, executor: Executor[Any]) -> None:
        """executor: computes with the drafter."""
        self._executor = executor
        self._draft_seqs: dict[Sequence, Sequence] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return at most limits[i] draft ids for sequences[i], and no ids if the drafter's cache is full."""
        drafts = [Draft(self._draft_seq(seq), limit) for seq, limit in zip(sequences, limits, strict=True)]
        while running := [draft for draft in drafts if len(draft.token_ids) < draft.limit]:
            if (plan := self._plan(running)) is None:
                break
            step = self._compute(plan)
            for item in plan.scheduled:
                item.sequence.num_computed_tokens += item.num_new_tokens
            sampled = {output.sequence: output for output in step.sequences}
            for draft in running:
                output = sampled.get(draft.seq)
                if output is not None:
                    draft.seq.token_ids += output.token_ids
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

    def _compute(self, plan: StepPlan) -> StepOutput:
        return self._executor.collect(self._executor.launch(plan, None))
