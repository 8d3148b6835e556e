"""Drafts by a second model, which runs ahead of the sequence, one token per step.

In: sequences. Out: draft token ids. The drafter has a twin of every sequence: a Sequence with the same parameters and the same
seed. So both models draw with the same random number at the same position, and where their probabilities are close, they draw
the same token at every temperature.
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

    twin: Sequence
    limit: int
    token_ids: list[int] = field(default_factory=list)


class TwinProposer(ABC):
    """Runs a drafter, as a Proposer. Subclasses say which blocks the twins have."""

    twin_class = Sequence

    def __init__(self, executor: Executor[Any]) -> None:
        """executor: computes with the drafter."""
        self._executor = executor
        self._twins: dict[Sequence, Sequence] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return at most limits[i] draft ids for sequences[i], and no ids if the drafter's cache is full."""
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
        """Drop the twin of a sequence that has ended."""
        self._twins.pop(seq, None)

    @abstractmethod
    def _twin(self, seq: Sequence) -> Sequence:
        """Return the twin with the sequence's tokens."""

    @abstractmethod
    def _plan(self, drafts: list[Draft]) -> StepPlan | None:
        """Plan the next step of the twins that have a place for it. None: no twin has."""

    def _new_twin(self, seq: Sequence) -> Sequence:
        twin = self._twins[seq] = self.twin_class(
            seq.request_id, seq.prompt_token_ids, replace(seq.params, logprobs=None, prompt_logprobs=None), seed=seq.seed,
            max_num_tokens=seq.max_num_tokens, eos_token_ids=seq.eos_token_ids, index=seq.index,
        )  # fmt: skip
        return twin

    def _compute(self, plan: StepPlan) -> StepOutput:
        return self._executor.collect(self._executor.launch(plan, None))
