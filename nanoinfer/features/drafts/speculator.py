"""Speculative decoding: guess some tokens, compute them in one step, keep the guesses that would have been sampled anyway.

In: the scheduler's plans. Out: the same plans with draft tokens, where these are expected to pay. A decode step reads every
weight to compute a row per sequence, so further rows cost little as long as reading the weights takes most of the time.

A draft is a row of its own, after the sequence's newest token. The token sampled at a row depends on the row's logits, on the
parameters and on (seed, position), as in any step. If the token sampled before a draft equals the draft, the draft's row was
computed from the right text, and its own token counts as well. The tokens are therefore those of plain decoding at every
temperature. A wrong draft costs only time, because its keys and values are overwritten.

    newest token   draft 1   draft 2   draft 3
        the          cat       sat       down        rows of the step
        cat          sat       on        .           sampled: the first three count, the last followed a wrong guess

Rejection sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192) accepts more drafts at high temperatures, but keeps
only the distribution and not the tokens of a seed.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import numpy as np

from nanoinfer.engine.observer import Planner
from nanoinfer.execution.executor import StepOutput
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.outputs import Counter, Metric, Vector
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of

INITIAL_ACCEPTANCE = 0.8  # the estimate before any draft was verified
MEMORY = 0.9  # the weight of the old estimate of a sequence's acceptance when a draft is verified
# Added to an estimate at each step for which no draft pays, up to INITIAL_ACCEPTANCE. A wrong try lowers an estimate a by
# a / 10, so the next one comes after 100 a steps. It takes the time of about a tokens, so tries take about 1% of the time.
RECOVERY = 0.001
COST_MEMORY = 0.95  # the weight of the old averages when a step is added to StepCost
OUTLIER = 4  # a longer step counts as this many times the average, because something was compiled or others had the CPU
FADING = 0.995  # decay per step that says nothing about the cost of a row, so that drafts are tried again


class Proposer(Protocol):
    """A source of drafts. LLM(speculative_config={"method": Mine}) makes one of your own, and checks the form of its drafts.

    It may keep state for a sequence, because the known tokens of a sequence never change: from call to call, token_ids only
    grows. nanoinfer.testing.check_proposer checks a class in your own tests.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        """config: the settings of speculative_config. No limit exceeds config.num_speculative_tokens."""

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Guess the tokens that follow sequences[i].token_ids, at most limits[i] of them, perhaps none.

        The sequences are those of this step that may draft, which must not be changed. Wrong guesses cost time, and change no
        token. An error fails the step, like that of a sampling stage.
        """

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept for a sequence that has ended, if anything is, perhaps again, or for one that never drafted."""


class StepCost:
    """A linear model of a decode step's seconds, a + b * num_rows, fitted to the latest steps by least squares.

    What a draft costs depends on the machine, the model, the load and the lengths, so it is measured while decoding.
    """

    def __init__(self) -> None:
        self.seconds_per_row = 0.0  # the slope b
        self.seconds_per_draft_token = 0.0  # the time to propose a draft token
        self._seconds_proposing = 0.0  # of the step that comes
        self._averages = np.zeros(6)  # the averages of rows, rows**2, seconds, rows * seconds, tokens, seconds proposing

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Add a decode step that computed num_rows rows and gave num_tokens tokens in `seconds`."""
        is_first = not self._averages.any()
        if not is_first:
            seconds = min(seconds, OUTLIER * self._averages[2])
        latest = np.array([num_rows, num_rows**2, seconds, num_rows * seconds, num_tokens, self._seconds_proposing])
        self._seconds_proposing = 0.0
        self._averages += (1.0 if is_first else 1 - COST_MEMORY) * (latest - self._averages)
        rows, rows_squared, average_seconds, rows_times_seconds, *_ = self._averages.tolist()
        variance = rows_squared - rows**2
        if variance > 0.1:
            self.seconds_per_row = max((rows_times_seconds - rows * average_seconds) / variance, 0.0)
        else:  # all steps had the same number of rows
            self.seconds_per_row *= FADING
        self.seconds_per_draft_token *= FADING  # so that it is measured again

    def time_proposal(self, proposer: Proposer, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return proposer.propose(sequences, limits), and measure the time that it takes."""
        start = time.perf_counter()
        drafts = proposer.propose(sequences, limits)
        self._seconds_proposing = time.perf_counter() - start
        seconds = self._seconds_proposing / max(sum(map(len, drafts)), 1)
        self.seconds_per_draft_token += (seconds - self.seconds_per_draft_token) / (2 if self.seconds_per_draft_token else 1)
        return drafts

    def num_that_pay(self, acceptance: float, limit: int) -> int:
        """Return the number of drafts, up to `limit`, whose last draft is still worth its time.

        Draft i counts only if all before it are right, so it gives acceptance^i tokens on average. It pays if that is more than
        the average number of tokens that the engine generates in the time of one draft.
        """
        _, _, average_seconds, _, tokens, proposing = self._averages.tolist()
        seconds = self.seconds_per_row + self.seconds_per_draft_token
        tokens_in_that_time = tokens / (average_seconds + proposing) * seconds if average_seconds else 0.0
        num, expected = 0, acceptance
        while num < limit and expected > tokens_in_that_time:
            num, expected = num + 1, expected * acceptance
        return num


@dataclass(slots=True)
class SpeculationMetrics:
    """Counts since the engine was made. num_accepted_tokens_per_pos[i] counts how often a draft's token i was accepted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


class Speculator(Planner):
    """Adds drafts to plans while they pay, and measures whether they do."""

    needs_tokens = True

    def __init__(self, proposer: Proposer, config: SpeculativeConfig) -> None:
        self.counts = SpeculationMetrics(num_accepted_tokens_per_pos=[0] * config.num_speculative_tokens)
        self.proposer = proposer
        self._config = config
        self._cost = StepCost()
        self._acceptance: dict[Sequence, float] = {}  # the estimated probability that the next draft is right
        self._initial_acceptance = INITIAL_ACCEPTANCE  # of a new sequence, as the latest drafts of all sequences were

    def plan(self, scheduler: Scheduler) -> StepPlan:
        return self.add_drafts(scheduler.schedule(), scheduler)

    def add_drafts(self, plan: StepPlan, scheduler: Scheduler) -> StepPlan:
        """Return the plan with drafts for the sequences for which they are expected to pay.

        Drafts take only free blocks, the oldest sequence first. Blocks of wrong or missing drafts stay with their sequence.
        """
        if plan.block_copies:  # are made when the step begins, and a proposer may read the blocks before
            return plan
        num_rows, max_num_rows = len(plan.rows), self._config.max_num_rows(scheduler.config.max_num_seqs)
        limits: dict[Sequence, int] = {}
        for item in plan.scheduled:
            if limit := _allocate(scheduler.block_manager, item.sequence, min(self._limit(item), max_num_rows - num_rows)):
                limits[item.sequence] = limit
                num_rows += limit
        if not limits:
            return plan
        proposed = self._cost.time_proposal(self.proposer, [*limits], [*limits.values()])
        drafts = dict(zip(limits, proposed, strict=True))
        for seq, draft in drafts.items():
            if len(draft) < limits[seq]:
                scheduler.block_manager.allocate(seq, 1 + len(draft))  # releases the state slots of missing drafts
        scheduled = [replace(item, draft_token_ids=tuple(drafts.get(item.sequence, ()))) for item in plan.scheduled]
        if not any(item.draft_token_ids for item in scheduled):
            return plan
        return replace(plan, scheduled=tuple(scheduled), rows=rows_of(scheduled))

    def step_collected(self, plan: StepPlan, output: StepOutput) -> None:
        """Update the estimates by the seconds that a step took, and the tokens that it gave each sequence."""
        num_tokens = {sampled.sequence: len(sampled.token_ids) for sampled in output.sequences}
        if not plan.num_prefill_tokens:
            self._cost.observe(len(plan.rows), sum(num_tokens.values()), sum(output.seconds.values()))
        for item in plan.scheduled:
            num_drafted = len(item.draft_token_ids)
            if not num_drafted or item.sequence not in num_tokens:
                continue
            num_accepted = max(num_tokens[item.sequence] - 1, 0)
            self.counts.num_drafts += 1
            self.counts.num_draft_tokens += num_drafted
            self.counts.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                self.counts.num_accepted_tokens_per_pos[position] += 1
            acceptance = self._acceptance.get(item.sequence, self._initial_acceptance)
            for is_right in [True] * num_accepted + [False] * (num_accepted < num_drafted):
                acceptance = MEMORY * acceptance + (1 - MEMORY) * is_right
                self._initial_acceptance = MEMORY * self._initial_acceptance + (1 - MEMORY) * is_right
            self._acceptance[item.sequence] = acceptance

    def sequence_finished(self, seq: Sequence) -> None:
        self._acceptance.pop(seq, None)
        self.proposer.forget(seq)

    def metrics_read(self, engine: object, metrics: list[Metric]) -> None:
        for name, count in asdict(self.counts).items():
            name = f"vllm:spec_decode_{name}"
            metrics.append(Vector(name, count) if isinstance(count, list) else Counter(name, count))

    def engine_closed(self) -> None:
        del self.proposer  # it may hold a model

    def _limit(self, item: ScheduledSequence) -> int:
        """Return how many drafts of a sequence are expected to pay."""
        seq = item.sequence
        if not item.num_new_tokens == seq.num_new_tokens == 1 or seq.forks:
            return 0  # not a decode
        limit = min(self._config.num_speculative_tokens, seq.max_num_tokens - seq.num_tokens - 1, seq.num_free_tokens)
        if not self._config.adaptive or limit == 0:
            return limit
        acceptance = self._acceptance.setdefault(seq, self._initial_acceptance)
        num = self._cost.num_that_pay(acceptance, limit)
        if num == 0:
            self._acceptance[seq] = min(acceptance + RECOVERY, INITIAL_ACCEPTANCE)
            self._initial_acceptance = min(self._initial_acceptance + RECOVERY, INITIAL_ACCEPTANCE)
        return num


def _allocate(block_manager: BlockManager, seq: Sequence, limit: int) -> int:
    """Allocate blocks for at most `limit` drafts, fewer if too few blocks are free, and return for how many."""
    while limit > 0 and not block_manager.can_allocate(seq, 1 + limit):
        limit -= 1
    if limit <= 0:
        return 0
    copies = block_manager.allocate(seq, 1 + limit)
    assert not copies, "the scheduler has copied the shared block that the newest token is written to"
    return limit
