"""Block managers with several KV groups: the invariants of any block manager, and what windows free, keep and share."""

import itertools
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from nanoinfer.attention.cpu import num_blocks_before
from nanoinfer.config import SchedulerConfig
from nanoinfer.features.hybrid.block_manager import HybridBlockManager, with_groups
from nanoinfer.features.hybrid.prefix_index import first_reached
from nanoinfer.features.hybrid.sizes import most_blocks
from nanoinfer.features.hybrid.tables import NO_BLOCK, tables_of
from nanoinfer.features.tracing import BlockEvicted, BlocksReleased, Recorder, TracingObserver
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.testing import machines
from nanoinfer_lab.testing.rules import Memory
from tests.helpers.block_machine import BlockMachine
from tests.helpers.growing import grow


class GroupedMemory(Memory):
    """A slot holds the group that wrote it, too: a block is of one group at a time."""

    def each(self, seq):
        for group, (table, window) in enumerate(zip(self.manager.tables(seq), self.manager.windows, strict=True)):
            yield group, table, window

    def write(self, seq, first, end):
        size = self.manager.block_size
        for group, table, _ in self.each(seq):
            for i in range(first, end):
                self.slots[table[i // size] * size + i % size] = group, tuple(seq.token_ids[: i + 1])

    def check(self, seq, end):
        """Every token that a query at the end reaches is where the table says, and no more is held than was reserved."""
        assert len(self.held(seq)) <= self.manager.num_blocks_for(seq.max_num_tokens)
        size, position = self.manager.block_size, min(end, seq.num_computed_tokens)
        for group, table, window in self.each(seq):
            for i in range(0 if window is None else max(position - window + 1, 0), end):
                assert self.slots[table[i // size] * size + i % size] == (group, tuple(seq.token_ids[: i + 1]))

    def capacity(self):
        return max(n for n in range(200) if self.manager.num_blocks_for(n) <= self.manager.num_blocks)

    def held(self, seq):
        return {block for table in self.manager.tables(seq) for block in table if block != NO_BLOCK}


@pytest.mark.parametrize("windows", [(3,), (None, 3), (5, None, 2)], ids=str)
def test_blocks_of_groups_are_where_their_tables_say_and_are_lost_by_nobody(windows):
    manager = partial(HybridBlockManager, windows=windows, chunk_size=7)
    own = {"block_manager_cls": staticmethod(manager), "memory_cls": GroupedMemory, "NUM_BLOCKS": 14}
    machines.run(type("Grouped", (BlockMachine,), own), 25, max_examples=30)


class GroupedLoad(machines.Load):
    memory_cls = GroupedMemory

    @initialize(
        windows=st.sampled_from([(4,), (None, 4), (2, None, 5)]),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        chunk_size=st.integers(1, 12),
        spare=st.integers(0, 10),
    )
    def begin(self, windows, block_size, max_num_seqs, budget, chunk_size, spare):
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, chunk_size=chunk_size)
        num_blocks = most_blocks(12, windows, block_size, config.chunk_grid) + spare
        manager = HybridBlockManager(num_blocks, block_size, windows=windows, chunk_size=config.chunk_grid)
        self.begin_with(config, manager)


@pytest.mark.slow
def test_a_scheduler_with_groups_keeps_the_rules_of_any_other():
    machine = type("GroupedLoads", (GroupedLoad,), {"scheduler_cls": Scheduler})
    machines.run(machine, 25, max_examples=30)


def computed(manager, token_ids, chunk=1000, cache_salt=None):
    """A sequence whose tokens have been computed in chunks, and the most tokens for which it held blocks."""
    seq = Sequence("r", list(token_ids), SamplingParams(), seed=0, max_num_tokens=10_000, cache_salt=cache_salt)
    prefix = manager.match_prefix(seq.token_ids, cache_salt)
    manager.start(seq, prefix)
    seq.num_computed_tokens, most = len(prefix) * manager.block_size, 0
    while seq.num_new_tokens:
        num_new = min(chunk, seq.num_new_tokens)
        manager.allocate(seq, num_new)
        seq.num_computed_tokens += num_new
        num_freed = sum(table.count(NO_BLOCK) for table in manager.tables(seq)) * manager.block_size
        most = max(most, seq.num_computed_tokens * len(manager.windows) - num_freed)
        manager.cache_finished_blocks(seq, seq.num_computed_tokens)
    return seq, most


@pytest.mark.parametrize("chunk", [1, 100, 512])
def test_4000_tokens_with_a_window_of_512_never_hold_more_than_window_block_and_chunk(chunk):
    manager = HybridBlockManager(4000 // 64 + 1, 64, windows=(512,), chunk_size=chunk)
    seq, most = computed(manager, range(4000), chunk)
    assert 512 <= most <= 512 + 64 + chunk
    assert manager.num_free_blocks == manager.num_blocks - manager.num_held_blocks(seq)  # the others can be taken at once
    assert manager.num_held_blocks(seq) == 9  # of tokens 3,456 to 3,999. The next query reaches 3,489


def test_full_attention_would_hold_every_block():
    """The negative control: what the test above counts can be more."""
    _, most = computed(HybridBlockManager(63, 64, windows=(None,), chunk_size=64), range(4000), 64)
    assert most == 4000


def test_the_example_of_the_docstring():
    recorder = Recorder()
    manager = HybridBlockManager(8, 4, True, observer := TracingObserver(recorder, 4), (None, 6), 14)
    seq, _ = computed(manager, range(14))
    assert seq.block_table == [0, 1, 2, 3]
    assert tables_of(seq).block_tables == [[NO_BLOCK, NO_BLOCK, 6, 7]]
    observer.flush()
    assert recorder.of(BlocksReleased) == [BlocksReleased("r", (4, 5))]


def test_a_hit_is_the_longest_prefix_that_every_group_can_serve():
    manager = HybridBlockManager(12, 4, windows=(None, 6), chunk_size=100)
    seq, _ = computed(manager, range(21))
    manager.free(seq)
    tokens = [*range(20), 99]
    assert len(manager.match_prefix(tokens)) == 5
    window_blocks = manager.match_prefix(tokens).tables[1]
    assert window_blocks[:3] == [NO_BLOCK] * 3  # a query at position 20 reaches tokens 15 to 20, of blocks 3 and 4
    assert NO_BLOCK not in window_blocks[3:]
    manager.evict(window_blocks[4])
    assert len(manager.match_prefix(tokens)) == 4
    manager.evict(manager.match_prefix(tokens).tables[0][0])  # without it, the group that keeps everything can serve nothing
    assert len(manager.match_prefix(tokens)) == 0


def test_a_window_alone_needs_only_its_own_blocks_for_a_hit_of_the_same_tokens_and_salt():
    manager = HybridBlockManager(12, 4, windows=(6,), chunk_size=100)
    seq, _ = computed(manager, range(21))
    [(_, first)] = manager.match_prefix([0, 1, 2, 3, 99])
    manager.evict(first)
    tokens = [*range(20), 99]
    assert [len(manager.match_prefix(tokens)) for _ in range(2)] == [5, 5]
    assert len(manager.match_prefix(tokens, "another tenant")) == 0
    tokens[2] = 77  # in place
    assert len(manager.match_prefix(tokens)) == 0
    manager.free(seq)


def test_a_sequence_with_windows_has_no_next_slot_that_is_known():
    manager = HybridBlockManager(num_blocks=8, block_size=2, windows=(None, 4))
    seq = Sequence("r", [5, 6, 7], SamplingParams(), seed=0, max_num_tokens=9)
    manager.allocate(seq, 3)
    seq.num_computed_tokens = 3
    grow(seq, 8)
    assert manager.next_slots([seq]) is None


def test_a_users_class_decides_for_every_group():
    class EvictsLast(BlockManager):
        def choose_evicted(self, candidates):
            return list(candidates)[-1]

    def first_evicted(manager_cls):
        recorder = Recorder()
        manager = with_groups(manager_cls)(6, 4, True, observer := TracingObserver(recorder, 4), (None, 4), 8)
        manager.free(computed(manager, range(8))[0])
        computed(manager, range(50, 59), chunk=8)
        observer.flush()
        return recorder.of(BlockEvicted)[0].block, manager.choose_evicted.__qualname__

    (oldest, _), (newest, name) = first_evicted(BlockManager), first_evicted(EvictsLast)
    assert oldest != newest
    assert name.endswith("EvictsLast.choose_evicted")


def test_attention_skips_the_blocks_that_are_freed_and_no_other():
    for position, window, block_size in itertools.product(range(20), (None, 1, 4, 6), (1, 4, 5)):
        assert num_blocks_before(position, window, block_size) == first_reached(position, window, block_size)


def test_a_key_goes_with_its_last_block_and_a_reset_frees_blocks_in_the_order_in_which_they_were_cached():
    manager = HybridBlockManager(8, 2, windows=(None, 3), chunk_size=4)
    seq = Sequence("r0", [5, 6, 7, 8], SamplingParams(), seed=0, max_num_tokens=9)
    manager.allocate(seq, 4)
    manager.cache_finished_blocks(seq, 4)
    assert len(manager.index.keys) == 2
    manager.free(seq)
    in_order = [block for group in manager.index.groups for block in group.ids.values()]
    manager.reset_prefix_cache()
    assert not manager.index.keys
    assert list(manager.blocks.empty)[-len(in_order) :] == in_order
