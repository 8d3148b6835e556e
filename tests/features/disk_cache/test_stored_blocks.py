"""Blocks with a store: by hand, then state machines with a store that loses what it likes."""

import hashlib
from array import array
from collections import Counter

import pytest
from hypothesis.stateful import precondition, rule

from nanoinfer.config import SchedulerConfig
from nanoinfer.features.disk_cache.stored_blocks import StoredBlockManager
from nanoinfer.features.hybrid.block_manager import with_groups
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import NOBODY
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.testing import machines
from nanoinfer_lab.testing.rules import Memory
from tests.features.hybrid.test_state_slots import States
from tests.helpers.block_machine import CHOICES, BlockMachine
from tests.helpers.told import Told


class DictStore:
    """A store in a dict of entries, with the contents of a machine's memory, or with block ids where there is none."""

    def __init__(self, memory=None, contents=None, max_blocks=100, fingerprint=bytes(32), max_tokens_per_step=100):
        self.contents = {} if contents is None else contents
        self.max_blocks, self.fingerprint, self.is_open, self.counts = max_blocks, fingerprint, True, Counter()
        self.max_tokens_per_step = max_tokens_per_step
        self.memory, self.filled, self.touched = memory, [], []

    def max_entries(self, group):
        return self.max_blocks

    def has(self, entry):
        return entry in self.contents

    def slots(self, block):
        size = self.memory.manager.block_size
        return slice(block * size, (block + 1) * size)

    def find(self, entry):
        assert self.is_open
        return self.contents.get(entry)

    def fill(self, group, block, content):
        self.filled.append(block)
        if self.memory is None:
            pass
        elif self.is_state(group):
            self.memory.states[block] = content
        else:
            self.memory.slots[self.slots(block)] = content

    def touch(self, entries):
        self.touched += entries

    def is_state(self, group):
        return self.memory.manager.state_slots is not None and group == len(self.memory.manager.windows)

    def keep(self, entry, block, *, wait=False):
        assert self.is_open
        if self.memory is None:
            self.contents[entry] = f"block {block}"
        elif self.is_state(entry[1]):
            self.contents[entry] = self.memory.states[block]
        else:
            self.contents[entry] = self.memory.slots[self.slots(block)]

    def discard(self, entry):
        self.contents.pop(entry, None)

    def close(self):
        self.is_open = False


def manager_with(contents=None, num_blocks=8, base=BlockManager, **store):
    return with_groups(base, StoredBlockManager)(num_blocks, 2, store=DictStore(contents=contents, **store))


def run(manager, token_ids, cache_salt=None):
    """Compute a sequence, as steps do. Returns it and the number of tokens that were found."""
    seq = Sequence("r", list(token_ids), SamplingParams(), seed=0, max_num_tokens=1000, cache_salt=cache_salt)
    prefix = manager.match_prefix(seq.token_ids, cache_salt)
    manager.start(seq, prefix)
    seq.num_computed_tokens = len(prefix) * manager.block_size
    manager.allocate(seq, seq.num_new_tokens)
    seq.num_computed_tokens = len(token_ids)
    manager.cache_finished_blocks(seq, len(token_ids))
    return seq, len(prefix) * manager.block_size


def keep(manager, *prompts, cache_salt=None):
    """Compute sequences, and free their blocks, one after the other."""
    for token_ids in prompts:
        manager.free(run(manager, token_ids, cache_salt)[0])


def kept(*prompts, cache_salt=None, **sizes):
    """The contents of a store after these sequences and the end of the manager."""
    manager = manager_with(**sizes)
    keep(manager, *prompts, cache_salt=cache_salt)
    manager.close()
    return manager.store.contents


def test_another_manager_finds_what_the_first_one_had_in_memory():
    second = manager_with(kept([5, 6, 7, 8, 9]))
    seq, num_found = run(second, [5, 6, 7, 8, 1])
    assert (num_found, second.store.filled) == (4, seq.block_table[:2])
    in_order = [(key, 0) for key in seq.prefix_keys[::-1]]  # the first block of a prompt is the last that the store may lose
    assert second.store.touched == in_order
    assert run(second, [5, 6, 7, 8, 1])[1] == 4
    assert len(second.store.filled) == 2  # now they are in memory
    assert run(second, [5, 7, 7, 8, 1])[1] == 0


def test_each_group_reads_its_own_block_of_the_store():
    def grouped(contents=None):
        layout = True, NOBODY, (None, 4), 4
        return with_groups(BlockManager, StoredBlockManager)(12, 2, *layout, store=DictStore(contents=contents))

    first, read = grouped(), []
    first.free(run(first, [5, 6, 7, 8, 9])[0])
    first.close()
    second = grouped(dict(first.store.contents))
    second.store.fill = lambda group, block, content: read.append((group, content))
    seq, num_found = run(second, [5, 6, 7, 8, 1])
    assert num_found == 4
    assert read == [(group, first.store.contents[key, group]) for key in seq.prefix_keys[:2] for group in (0, 1)]
    assert len(set(read)) == 4


def test_a_key_is_the_digest_of_fingerprint_salt_and_all_tokens():
    def digest(before, *token_ids):
        return hashlib.sha256(before + array("i", token_ids).tobytes()).digest()

    for salt, root in ((None, bytes(32)), ("tenant", bytes(32) + b"tenant")):
        seq, _ = run(manager_with(), [5, 6, 7, 8, 9], salt)
        first = digest(hashlib.sha256(root).digest(), 5, 6)
        assert seq.prefix_keys == [first, digest(first, 7, 8)]
    assert run(manager_with(fingerprint=b"x" * 32), [5, 6, 7])[0].prefix_keys != run(manager_with(), [5, 6, 7])[0].prefix_keys


def test_without_a_store_a_key_has_no_fingerprint():
    seq, _ = run(BlockManager(8, 2), [5, 6, 7])
    root = hashlib.sha256(b"").digest()
    assert seq.prefix_keys == [hashlib.sha256(root + array("i", [5, 6]).tobytes()).digest()]


def test_requests_with_another_salt_find_nothing_in_the_store():
    contents = kept([5, 6, 7], cache_salt="a")
    found = {salt: run(manager_with(dict(contents)), [5, 6, 7], salt)[1] for salt in (None, "a", "b")}
    assert found == {None: 0, "a": 2, "b": 0}


def test_what_is_evicted_is_kept_and_found_again():
    manager = manager_with(num_blocks=3)
    keep(manager, [5, 6, 7, 8, 9])
    assert manager.store.contents == {}
    keep(manager, [1, 2, 3, 4, 5])
    assert len(manager.store.contents) == 2
    assert run(manager, [5, 6, 7, 8, 9])[1] == 4


def test_a_block_in_memory_is_used_after_one_that_was_evicted_before_it():
    class FirstFirst(BlockManager):
        def choose_evicted(self, candidates):
            return min(candidates)

    manager = manager_with(num_blocks=4, base=FirstFirst)
    keep(manager, [5, 6, 7, 8])
    keep(manager, [1, 1, 1, 1, 1])  # two empty blocks, and the one of 5 and 6
    [kept] = manager.store.contents.values()
    assert kept == "block 0"
    seq, num_found = run(manager, [5, 6, 7, 8, 9])
    assert (num_found, len(manager.store.filled)) == (4, 1)
    assert seq.block_table[1] == 1


def test_a_policy_that_evicts_a_block_in_use_is_told_so():
    class Wrong(BlockManager):
        def choose_evicted(self, candidates):
            return next(block for block in range(self.num_blocks) if block not in candidates)

    manager = manager_with(num_blocks=3, base=Wrong)
    keep(manager, [5, 6, 7, 8])
    with pytest.raises(AssertionError, match="choose_evicted returns one of the candidates"):
        run(manager, [1, 1, 1, 1])


def test_nothing_is_read_for_a_sequence_that_has_no_room():
    second = manager_with(kept([5, 6, 7, 8, 9]), num_blocks=3)
    other, _ = run(second, [1, 2, 3])
    assert len(second.match_prefix([5, 6, 7, 8, 9])) == 0
    assert second.store.filled == []
    second.free(other)
    assert len(second.match_prefix([5, 6, 7, 8, 9])) == 2


def test_while_sequences_run_a_step_reads_a_limited_number_of_tokens_and_a_later_one_goes_on():
    prompt = list(range(100, 111))
    contents = kept(prompt, num_blocks=12)
    manager = manager_with(contents, num_blocks=12, max_tokens_per_step=4)
    scheduler = Scheduler(SchedulerConfig(), manager, Told())

    def step(*new):
        for request_id, token_ids in new:
            scheduler.add(Sequence(request_id, token_ids, SamplingParams(), seed=0, max_num_tokens=20))
        num_before, plan = len(manager.store.filled), scheduler.schedule()
        scheduler.commit(plan)
        for item in plan.scheduled:
            scheduler.append(item.sequence, 7)
        started = {item.sequence.request_id: scheduler.observer.num_cached[item.sequence] for item in plan.scheduled}
        return started, len(manager.store.filled) - num_before

    assert step(("running", [1, 2])) == ({"running": 0}, 0)
    assert step(("long", prompt), ("later", [3, 4])) == ({"running": 0}, 2)
    assert step() == ({"running": 0}, 2)
    assert manager.store.touched == []
    assert step() == ({"running": 0, "long": 10, "later": 0}, 1)
    long = next(item for item in scheduler.running if item.request_id == "long")
    assert manager.store.touched == [(key, 0) for key in long.prefix_keys[4::-1]]  # each block once, and the first one last
    alone = manager_with(contents, num_blocks=12, max_tokens_per_step=4)
    assert run(alone, prompt)[1] == 10  # nobody waits for it


def test_only_the_most_recently_used_blocks_are_kept_at_the_end_if_there_is_no_room_for_all():
    prompts = [5, 6, 7, 8, 9], [1, 2, 3, 4, 5]
    contents = kept(*prompts, max_blocks=3)
    assert [run(manager_with(dict(contents)), token_ids)[1] for token_ids in prompts] == [2, 4]


def test_blocks_of_a_sequence_that_failed_are_kept_nowhere():
    manager = manager_with(num_blocks=3)
    keep(manager, [5, 6, 7], [1, 2, 3, 4, 5])
    seq, num_found = run(manager, [5, 6, 7])
    assert num_found == 2
    manager.forget_cached(seq)
    manager.free(seq)
    assert run(manager, [5, 6, 7])[1] == 0


def test_a_reset_leaves_the_store():
    manager = manager_with(num_blocks=3)
    keep(manager, [5, 6, 7], [1, 2, 3, 4, 5])
    assert len(manager.store.contents) == 1
    manager.reset_prefix_cache()
    keep(manager, [5, 6, 7])
    assert run(manager, [1, 2, 3, 4, 5])[1] == 0
    manager.close()
    assert len(manager.store.contents) == 1


class StoredMemory(Memory):
    """What a cache holds, beside what a store does."""

    def __init__(self, manager):
        super().__init__(manager)
        manager.store.memory = self


def new_manager(*sizes):
    return with_groups(BlockManager, StoredBlockManager)(*sizes, store=DictStore(max_tokens_per_step=3))


class StoredBlocks(BlockMachine):
    block_manager_cls = staticmethod(new_manager)
    memory_cls = StoredMemory

    @precondition(lambda self: self.manager.store.contents)
    @rule(choice=CHOICES)
    def lose(self, choice):
        keys = sorted(self.manager.store.contents)
        self.manager.store.discard(keys[choice % len(keys)])

    @rule()
    def restart(self):
        for seq in self.alive:
            self.manager.free(seq)
        self.alive = []
        self.manager.close()
        contents = self.manager.store.contents
        self.manager = self.block_manager_cls(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.memory = self.memory_cls(self.manager)
        self.manager.store.contents = contents
        self.check()


@pytest.mark.slow
def test_every_token_is_where_its_block_table_says_whatever_the_store_loses():
    machines.run(StoredBlocks, 40, max_examples=60)


@pytest.mark.slow
def test_a_scheduler_keeps_its_rules_with_a_store():
    machine = type("StoredLoad", (machines.Load,), {"memory_cls": StoredMemory})
    machines.check_random_loads(Scheduler, staticmethod(new_manager), machine, max_examples=30)


class StoredStates(StoredMemory, States):
    """What a cache with states holds, beside what a store does."""


@pytest.mark.slow
def test_every_state_is_where_its_sequence_reads_it_whatever_the_store_loses():
    def with_states(*sizes):
        return with_groups(BlockManager, StoredBlockManager)(
            *sizes, True, NOBODY, (None,), 1, 4, store=DictStore(max_tokens_per_step=3)
        )

    classes = {"block_manager_cls": staticmethod(with_states), "memory_cls": StoredStates}
    machine = type("StoredBlocksAndStates", (StoredBlocks,), classes)
    machines.run(machine, 40, max_examples=30)
