"""check_random_loads and check_block_manager name the rule that a wrong class breaks, under a run that a person can read.

tests/scheduling has classes that pass.
"""

from dataclasses import replace

import pytest
from hypothesis import Phase

from nanoinfer.errors import NanoinferError
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer_lab.testing.machines import check_random_loads
from tests.helpers.block_machine import check_block_manager

pytestmark = pytest.mark.slow


class ForgetsCopies(BlockManager):
    def allocate(self, seq, num_new_tokens):
        return super().allocate(seq, num_new_tokens)[1:]


class KeepsBlocks(BlockManager):
    def free(self, seq):
        if len(seq.block_table) > 1:
            self.blocks.hold(seq.block_table[-1:])
        super().free(seq)


class SharesWithOtherTexts(BlockManager):
    def match_prefix(self, token_ids, cache_salt=None):
        return super().match_prefix([0] * len(token_ids), cache_salt)


@pytest.mark.parametrize(
    ("block_manager_cls", "rule"),
    [
        (ForgetsCopies, r"block \d must hold token \d of sequence \d, which follows from \(.*\), but it holds (nothing|what)"),
        (KeepsBlocks, r"num_free_blocks must be \d, because the block tables of .* have \d of 6 blocks, got|after every seq"),
        (SharesWithOtherTexts, r"block \d must hold token \d of .*, but it holds what follows from \(None, \(0,"),
    ],
)
def test_a_rule_that_a_block_manager_breaks_is_named(block_manager_cls, rule):
    with pytest.raises(AssertionError, match=rule):
        check_block_manager(block_manager_cls, phases=[Phase.generate], derandomize=True)


class Changed(Scheduler):
    """A scheduler whose plans are changed."""

    def schedule(self):
        return self.changed(super().schedule())


class LeavesOut(Changed):
    def changed(self, plan):
        decoding = [item for item in plan.scheduled if item.num_new_tokens == 1]
        return replace(plan, scheduled=tuple(item for item in plan.scheduled if item not in decoding[1:]))


class RunsNobody(Changed):
    def changed(self, plan):
        return replace(plan, scheduled=()) if len(plan.scheduled) > 2 else plan


class TellsOfTooMany(Scheduler):
    def schedule(self):
        plan = super().schedule()
        for item in plan.scheduled[1:]:
            self.observer.sequence_preempted(item.sequence)
        return plan


class Exceeds(Scheduler):
    """A scheduler that plans by another configuration."""

    def schedule(self):
        config, self.config = self.config, replace(self.config, **self.limits)
        plan = super().schedule()
        self.config = config
        return plan


class ExceedsTheBudget(Exceeds):
    limits = {"max_num_batched_tokens": 64}  # noqa: RUF012


class ExceedsThePlaces(Exceeds):
    limits = {"max_num_seqs": 8}  # noqa: RUF012


class ChunksAnywhere(Scheduler):
    def next_chunk(self, seq, start):
        return min(super().next_chunk(seq, start), 3)


class NeverStarts(Scheduler):
    def may_start(self, seq):
        return seq.priority < 2


@pytest.mark.parametrize(
    ("scheduler_cls", "error", "rule"),
    [
        (LeavesOut, AssertionError, r"rules 2 and 3: a step must compute 1 of \d.*, got "),
        (RunsNobody, AssertionError, r"a step must compute or preempt a sequence of \d"),
        (TellsOfTooMany, AssertionError, r"the preempted sequences for the observer must be .*, got .*\d"),
        (ExceedsTheBudget, AssertionError, r"rules 2 and 3: a step must compute|rule 6: sequence \d+ must wait"),
        (ExceedsThePlaces, AssertionError, r"rule 6: (sequence \d+ must wait|order_waiting must not be called)"),
        (ChunksAnywhere, AssertionError, r"rules 2 and 3: a step must compute"),
        (NeverStarts, NanoinferError, r"NeverStarts starts none of \d+ waiting sequences, and none runs; order_waiting must"),
    ],
)
def test_a_rule_that_a_scheduler_breaks_is_named(scheduler_cls, error, rule):
    with pytest.raises(error, match=rule):
        check_random_loads(scheduler_cls, phases=[Phase.generate], derandomize=True)


@pytest.mark.parametrize(
    ("check", "policy", "most_calls"), [(check_block_manager, ForgetsCopies, 5), (check_random_loads, ExceedsThePlaces, 8)]
)
def test_a_run_that_breaks_a_rule_is_short(check, policy, most_calls):
    with pytest.raises(AssertionError) as caught:
        check(policy, derandomize=True)
    calls = [line for note in caught.value.__notes__ for line in note.splitlines() if line.startswith("state.")]
    assert 1 < len(calls) <= most_calls, calls
