"""States: by hand with blocks of two tokens, then state machines, with drafts as well."""

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from nanoinfer.errors import InvalidValueError
from nanoinfer.features.hybrid.block_manager import HybridBlockManager
from nanoinfer.features.hybrid.sizes import num_states_in
from nanoinfer.features.hybrid.tables import tables_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.policies import DeadlineScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.testing import machines
from nanoinfer_lab.testing.rules import Memory
from tests.helpers.block_machine import CHOICES, BlockMachine, check_block_manager
from tests.helpers.growing import grow


def make(num_state_slots, num_blocks=8, **more):
    return HybridBlockManager(num_blocks, 2, num_state_slots=num_state_slots, **more)


def sequence(token_ids, name="r", cache_salt=None):
    return Sequence(name, list(token_ids), SamplingParams(), seed=0, max_num_tokens=1000, cache_salt=cache_salt)


def start(manager, seq):
    """Start a sequence on its prefix and compute its tokens. Returns how many of them were not computed."""
    prefix = manager.match_prefix(seq.token_ids, seq.cache_salt)
    manager.start(seq, prefix)
    seq.num_computed_tokens = len(prefix) * manager.block_size
    run(manager, seq)
    return len(prefix) * manager.block_size


def test_half_of_the_memory_must_hold_a_state():
    assert num_states_in(120, state_bytes=60, max_num_seqs=4) == 1
    assert num_states_in(1000, state_bytes=60, max_num_seqs=4) == 8
    assert num_states_in(1000, state_bytes=0, max_num_seqs=4) == 0
    with pytest.raises(InvalidValueError, match="half of the cache's 119 bytes must hold the state of a sequence, 60 bytes"):
        num_states_in(119, state_bytes=60, max_num_seqs=4)


def run(manager, seq):
    manager.allocate(seq, seq.num_new_tokens)
    seq.num_computed_tokens += seq.num_new_tokens
    manager.cache_finished_blocks(seq, seq.num_computed_tokens)


def test_a_prompt_can_be_continued_after_its_last_whole_block_and_a_growing_text_after_each():
    manager = make(12, 12)
    first = sequence([5, 6, 7, 8, 9])
    assert start(manager, first) == 0
    assert [*tables_of(first).state_writes] == [4, 5]  # after the last whole block, and after all tokens
    assert start(manager, sequence([5, 6, 7, 8, 1, 1])) == 4
    assert start(manager, sequence([5, 6, 7, 8, 1, 1], cache_salt="a")) == 0
    assert start(manager, sequence([5, 6, 1, 1])) == 0  # the block of 5 and 6 is cached, but not the state after it
    manager, growing = make(8), sequence([5])
    start(manager, growing)
    for token_id in (6, 7, 8, 9):
        grow(growing, token_id)
        run(manager, growing)
    assert start(manager, sequence([5, 6, 1])) == 2
    assert start(manager, sequence([5, 6, 7, 8, 1])) == 4


def test_one_slot_is_enough_because_a_sequence_gives_up_its_own_checkpoint():
    manager = make(1)
    seq = sequence([5, 6])
    start(manager, seq)
    for token_id in (7, 8, 9):
        grow(seq, token_id)
        assert manager.can_allocate(seq, 1)
        run(manager, seq)
    assert start_would_reuse(manager, [5, 6, 7, 8, 1]) == 0
    manager.free(seq)
    assert manager.state_slots.pool.num_free == 1


def start_would_reuse(manager, token_ids):
    return len(manager.match_prefix(token_ids)) * manager.block_size


def test_a_checkpoint_is_taken_before_a_slot_that_a_sequence_has_and_the_oldest_first():
    manager = make(3)
    for token_ids in ([1, 1], [2, 2]):
        seq = sequence(token_ids)
        start(manager, seq)
        manager.free(seq)
    running = sequence([3])
    start(manager, running)
    other = sequence([4])
    start(manager, other)  # no slot is empty
    assert start_would_reuse(manager, [1, 1, 0]) == 0
    assert start_would_reuse(manager, [2, 2, 0]) == 2
    assert manager.can_start(1, [])
    start(manager, sequence([5]))
    assert start_would_reuse(manager, [2, 2, 0]) == 0
    assert not manager.can_start(1, [])  # sequences have all three


def test_a_growing_text_gives_up_its_own_checkpoints_before_those_of_others():
    manager = make(3, 12)
    other, growing = sequence([1, 1]), sequence([5])
    start(manager, other)
    manager.free(other)
    start(manager, growing)
    for token_id in range(6, 14):
        grow(growing, token_id)
        run(manager, growing)
    assert start_would_reuse(manager, [1, 1, 0]) == 2


def test_a_checkpoint_goes_with_its_block():
    manager = make(8, num_blocks=2)
    seq = sequence([5, 6, 7])
    start(manager, seq)
    manager.free(seq)
    assert start_would_reuse(manager, [5, 6, 1]) == 2
    start(manager, sequence([1, 2, 3, 4]))  # takes both blocks
    assert start_would_reuse(manager, [5, 6, 1]) == 0
    assert manager.state_slots.pool.num_free == 7


# ---- with the state machines


class States(Memory):
    """The slots of a cache, and what the slots of states would hold: all tokens so far."""

    def __init__(self, manager):
        super().__init__(manager)
        self.states = {-1: ()}

    def write(self, seq, first, end):
        super().write(seq, first, end)
        assert self.states[tables_of(seq).state_slot] == tuple(seq.token_ids[:first])
        for num_tokens, slot in tables_of(seq).state_writes.items():
            self.states[slot] = tuple(seq.token_ids[:num_tokens])
        assert end in tables_of(seq).state_writes


def with_states(num_state_slots):
    """A block manager for the machines, which call it as a class."""
    return staticmethod(partial(HybridBlockManager, num_state_slots=num_state_slots))


BITS = st.integers(0, 1)


class BlocksAndStates(BlockMachine):
    memory_cls = States

    @precondition(lambda self: self.alive)
    @rule(choice=CHOICES, token_id=BITS, drafts=st.lists(BITS, max_size=3), accepted=st.integers(0, 3))
    def speculate(self, choice, token_id, drafts, accepted):
        seq = self.chosen(choice)
        grow(seq, token_id)
        if not self.manager.can_allocate(seq, 1):
            seq.token_ids.pop()
            seq.num_tokens -= 1
            return
        copies = self.manager.allocate(seq, 1)
        while drafts and not self.manager.can_allocate(seq, 1 + len(drafts)):
            drafts = drafts[:-1]
        if drafts:
            copies += self.manager.allocate(seq, 1 + len(drafts))
        self.memory.copy(copies)
        seq.token_ids += drafts
        self.memory.write(seq, seq.num_computed_tokens, len(seq.token_ids))
        del seq.token_ids[len(seq.token_ids) - len(drafts) :]
        seq.num_computed_tokens += 1
        self.manager.cache_finished_blocks(seq, seq.num_computed_tokens)
        for draft in drafts[:accepted]:
            grow(seq, draft)
            seq.num_computed_tokens += 1
        self.check()

    def check(self):
        super().check()
        records = [tables_of(seq) for seq in self.alive]
        held = {slot for record in records for slot in (record.state_slot, *record.state_writes.values())} - {-1}
        pool = self.manager.state_slots.pool
        assert pool.num_free == len(pool.contents) - len(held)

    def teardown(self):
        super().teardown()
        pool = self.manager.state_slots.pool
        assert pool.num_free == len(pool.contents)


class LoadWithStates(machines.Load):
    memory_cls = States

    def teardown(self):
        super().teardown()
        if hasattr(self, "scheduler"):
            pool = self.scheduler.block_manager.state_slots.pool
            assert pool.num_free == len(pool.contents)


@pytest.mark.slow
def test_every_state_is_where_its_sequence_reads_it():
    for num_state_slots in (2, 5, 12):
        check_block_manager(with_states(num_state_slots), BlocksAndStates, max_examples=30)


@pytest.mark.slow
def test_the_scheduler_keeps_its_rules_with_few_slots_and_with_many():
    for scheduler, num_state_slots in ((Scheduler, 1), (Scheduler, 4), (DeadlineScheduler, 9)):
        machines.check_random_loads(scheduler, with_states(num_state_slots), LoadWithStates, max_examples=20)
