"""The rules that each step keeps, whatever the scheduler and the block manager, and a model of the memory.

A slot holds what a real cache would hold: a token's keys and values depend on all tokens before it, so a slot holds their
tuple. If every slot that a step reads holds what it should, the tokens are those of any other policy. Only public names of the
two classes are used.
"""

from collections.abc import Iterable
from typing import Any

from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan


class Memory:
    """The slots of a cache."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.slots: list[Any] = [None] * (manager.num_blocks * manager.block_size)

    def content(self, seq: Sequence, i: int) -> object:
        """Return what the slot of token i must hold."""
        return tuple(seq.token_ids[: i + 1])

    def slot(self, seq: Sequence, i: int) -> int:
        return seq.block_table[i // self.manager.block_size] * self.manager.block_size + i % self.manager.block_size

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        size = self.manager.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

    def write(self, seq: Sequence, first: int, end: int) -> None:
        for i in range(first, end):
            self.slots[self.slot(seq, i)] = self.content(seq, i)

    def check(self, seq: Sequence, end: int) -> None:
        """Check that every one of the sequence's first `end` tokens is where its block table says."""
        for i in range(end):
            found, expected = self.slots[self.slot(seq, i)], self.content(seq, i)
            assert found == expected, (
                f"block {seq.block_table[i // self.manager.block_size]} must hold token {i} of sequence {seq.sequence_id}, "
                f"which follows from {expected}, but it holds {'nothing' if found is None else f'what follows from {found}'}"
            )

    def capacity(self) -> int:
        """Return the tokens of the longest sequence that fits alone."""
        return self.manager.num_blocks * self.manager.block_size

    def held(self, seq: Sequence) -> set[int]:
        return set(seq.block_table)


def run_step(scheduler: Scheduler, memory: Memory, unfinished: list[Sequence], num_unread: int = 0) -> StepPlan:
    """Schedule, compute and commit a step. The caller samples its rows.

    num_unread: the tokens of the step before that the scheduler does not know yet (async_scheduling).

    Raises:
        AssertionError: the step breaks a rule, which the message states.
    """
    config = scheduler.config
    decoding = [seq for seq in scheduler.running if seq.num_new_tokens == 1 and seq.num_tokens < seq.max_num_tokens]
    plan = scheduler.schedule()
    scheduled = {item.sequence: item.num_new_tokens for item in plan.scheduled}
    assert scheduled or plan.preempted or num_unread, f"a step must compute or preempt a sequence of {names(unfinished)}"
    left_out = [seq for seq in decoding if seq not in scheduled and seq not in plan.preempted]
    assert not left_out, f"a step must compute or preempt each running sequence with one new token, not {names(left_out)}"
    both = [seq for seq in plan.preempted if seq in scheduled]
    assert not both, f"a step must not compute what it preempts, got {names(both)}"
    limit, num_tokens = config.max_num_batched_tokens, plan.num_prefill_tokens
    assert num_tokens <= limit, f"a step must compute at most {limit} prompt tokens (max_num_batched_tokens), got {num_tokens}"
    running = [seq for seq in unfinished if seq.status is SequenceStatus.RUNNING]
    assert {*running} == {*scheduler.running}, (
        f"scheduler.running must have the sequences whose status is RUNNING, {names(running)}, got {names(scheduler.running)}"
    )
    limit = config.max_num_seqs
    assert len(running) <= limit, f"at most {limit} sequences must run (max_num_seqs), got {names(running)}"
    memory.copy(plan.block_copies)
    for seq, num_new in scheduled.items():
        end, grid = seq.num_computed_tokens + num_new, config.chunk_grid
        assert end == seq.num_tokens or end % grid == 0, (
            f"a chunk must end with the sequence, at {seq.num_tokens}, or at a multiple of {grid} (chunk_grid), but that of "
            f"sequence {seq.sequence_id} ends at {end}"
        )
        num_blocks = -(-end // memory.manager.block_size)
        assert len(seq.block_table) >= num_blocks, (
            f"sequence {seq.sequence_id} must have {num_blocks} blocks for {end} tokens, got {seq.block_table}"
        )
        memory.write(seq, seq.num_computed_tokens, end)
    for seq, num_new in scheduled.items():
        memory.check(seq, seq.num_computed_tokens + num_new)
    scheduler.commit(plan)
    return plan


def names(sequences: Iterable[Sequence]) -> str:
    return ", ".join(seq.sequence_id for seq in sequences)
