"""Who runs: by hand, then the state machine of machines.py, which checks the rules at every step of random loads."""

import gc
import weakref

import pytest

from nanoinfer.config import SchedulerConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer_lab.testing.machines import check_random_loads
from tests.helpers.told import Told


def make(num_blocks=64, block_size=2, **config):
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "chunk_size": 4} | config
    return Scheduler(SchedulerConfig(**config), BlockManager(num_blocks, block_size))


def sequence(name, num_tokens, max_num_tokens=100, first=0):
    return Sequence(name, list(range(first, first + num_tokens)), SamplingParams(), seed=0, max_num_tokens=max_num_tokens)


def step(scheduler, token_id=7):
    """One step with a model that always says the same token. Returns {request: tokens computed}."""
    plan = scheduler.schedule()
    scheduler.commit(plan)
    for seq, _ in plan.rows:
        scheduler.append(seq, token_id)
        if len(seq.token_ids) >= seq.max_num_tokens:
            scheduler.finish(seq)
    return {item.sequence.request_id: item.num_new_tokens for item in plan.scheduled}


def test_a_prompt_is_cut_at_multiples_of_the_grid_and_then_decodes():
    scheduler = make()
    scheduler.add(sequence("a", 10))
    assert [step(scheduler) for _ in range(5)] == [{"a": 4}, {"a": 4}, {"a": 2}, {"a": 1}, {"a": 1}]


def test_chunked_prefill_and_decode_share_a_step_and_decodes_stand_first():
    scheduler = make()
    scheduler.add(sequence("long", 9, first=50))
    assert step(scheduler) == {"long": 4}
    scheduler.add(sequence("short", 1))
    assert step(scheduler) == {"long": 4, "short": 1}
    plan = scheduler.schedule()
    assert [(item.sequence.request_id, item.num_new_tokens) for item in plan.scheduled] == [("long", 1), ("short", 1)]


def test_a_chunk_runs_whole_or_waits_and_no_younger_prompt_passes_it():
    scheduler = make(max_num_batched_tokens=6)
    for name, length in (("a", 4), ("b", 4), ("c", 2)):
        scheduler.add(sequence(name, length, first=10 * length + ord(name)))
    assert step(scheduler) == {"a": 4}  # 2 are left: not enough for b, and c waits behind b
    assert step(scheduler) == {"a": 1, "b": 4, "c": 2}


def test_decodes_are_not_counted_against_the_prompt_budget():
    scheduler = make(max_num_batched_tokens=4)
    for i in range(4):
        scheduler.add(sequence(f"d{i}", 1, first=10 * i))
    assert step(scheduler) == {f"d{i}": 1 for i in range(4)}
    scheduler.add(sequence("p", 4, first=90))
    assert step(scheduler) == {f"d{i}": 1 for i in range(4)} | {"p": 4}


def test_when_blocks_run_out_the_youngest_waits_and_recomputes():
    scheduler = make(num_blocks=5, block_size=2)
    scheduler.observer = Told()
    old, young = sequence("old", 3, 10), sequence("young", 3, 10, first=50)
    scheduler.add(old)
    scheduler.add(young)
    assert step(scheduler) == {"old": 3, "young": 3}
    assert step(scheduler) == {"old": 1, "young": 1}
    assert step(scheduler) == {"old": 1}  # it took the fifth block for its fifth token
    assert young.status is SequenceStatus.WAITING
    assert (scheduler.observer.preempted, young.num_computed_tokens, young.block_table) == ([young], 0, [])
    while old.status is not SequenceStatus.FINISHED:
        assert "young" not in step(scheduler)
    assert step(scheduler)["young"] > 1  # its output is part of what it computes again
    assert scheduler.observer.preempted == [young]


def test_a_sequence_starts_only_if_a_block_is_left_for_every_running_one():
    scheduler = make(num_blocks=4, block_size=2)
    scheduler.add(sequence("old", 3, 8))
    scheduler.add(sequence("young", 3, 8, first=50))
    assert step(scheduler) == {"old": 3}  # two blocks are free: enough for young, but not for old's next one, too


def test_no_block_is_kept_free_for_a_sequence_that_cannot_grow_into_it():
    """Blocks of 4 in a pool of 2; the last token of a sequence is never computed, so one of 5 needs one block."""
    for max_num_tokens, both_run in ((5, True), (6, False)):
        scheduler = make(num_blocks=2, block_size=4)
        for name, first in (("a", 0), ("b", 20)):
            scheduler.add(sequence(name, 4, max_num_tokens, first))
        assert step(scheduler) == ({"a": 4, "b": 4} if both_run else {"a": 4})


def test_finishing_twice_or_before_running_frees_everything_once():
    scheduler = make()
    waiting, running = sequence("w", 4), sequence("r", 4, first=50)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(waiting)
    for seq in (waiting, running, running):
        scheduler.finish(seq)
    assert scheduler.num_unfinished == 0
    assert scheduler.block_manager.num_free_blocks == 64


def test_nothing_refers_to_a_finished_sequence_so_its_memory_needs_no_garbage_collector():
    scheduler = make()
    scheduler.add(seq := sequence("a", 4))
    while seq.num_output_tokens < 3:
        step(scheduler)
    scheduler.finish(seq)
    seq.sampling_state = type("Kept", (), {})()  # a sequence itself has no weak references
    remembered = weakref.ref(seq.sampling_state)
    gc.disable()
    try:
        del seq
        assert remembered() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_random_loads_keep_the_rules():
    check_random_loads(max_examples=50)


def test_forks_without_a_place_wait_in_the_order_of_their_prompts():
    scheduler = make(max_num_seqs=2)
    for name, first in (("a", 0), ("b", 50)):
        parent, *forks = (sequence(name, 3, 5, first) for _ in range(3))
        for index, fork in enumerate(forks, start=1):
            fork.index = index
        parent.forks = forks
        scheduler.add(parent)
    started = []
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        started += [seq.sequence_id for seq, _ in plan.rows if seq.sequence_id not in started]
        scheduler.commit(plan)
        for seq, _ in plan.rows:
            scheduler.append(seq, 7)
            if len(seq.token_ids) >= seq.max_num_tokens:
                scheduler.finish(seq)
    assert started == ["a", "b", "a.1", "a.2", "b.1", "b.2"]
