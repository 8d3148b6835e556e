"""Blocks: by hand with blocks of two tokens, then a state machine (helpers/block_machine.py)."""

from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.block_machine import BlockMachine, check_block_manager
from tests.helpers.growing import grow


def sequence(token_ids, name="r", cache_salt=None):
    return Sequence(name, list(token_ids), SamplingParams(), seed=0, max_num_tokens=1000, cache_salt=cache_salt)


def run(manager, seq, num_tokens=None):
    """Allocate, 'compute' and register a sequence's tokens, as a step does. Returns the copies owed."""
    num_tokens = seq.num_new_tokens if num_tokens is None else num_tokens
    copies = manager.allocate(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    manager.cache_finished_blocks(seq, seq.num_computed_tokens)
    return copies


def take_prefix(manager, seq):
    """Start a sequence on the blocks of its prefix. Returns how many of its tokens they hold."""
    manager.start(seq, manager.match_prefix(seq.token_ids, seq.cache_salt))
    return len(seq.block_table) * manager.block_size


def start(manager, seq):
    seq.num_computed_tokens = take_prefix(manager, seq)
    run(manager, seq)
    return seq


def test_a_block_is_taken_only_when_the_one_before_it_is_full():
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = start(manager, sequence([5, 6, 7]))
    assert seq.block_table == [0, 1]
    grow(seq, 8)
    run(manager, seq)
    assert seq.block_table == [0, 1]  # the fourth token fits
    grow(seq, 9)
    run(manager, seq)
    assert seq.block_table == [0, 1, 2]
    manager.free(seq)
    assert manager.num_free_blocks == 4


def test_a_prompt_shares_the_finished_blocks_of_one_that_begins_alike():
    manager = BlockManager(num_blocks=8, block_size=2)
    first = start(manager, sequence([5, 6, 7, 8, 9]))
    second = sequence([5, 6, 7, 8, 1, 1])
    assert take_prefix(manager, second) == 4
    assert second.block_table == first.block_table[:2]
    third = sequence([5, 6, 1, 8, 9])
    assert take_prefix(manager, third) == 2
    fourth = sequence([6, 6, 7, 8, 9])  # the same second block behind another first one
    assert take_prefix(manager, fourth) == 0


def test_prompts_with_different_salts_share_no_block():
    manager = BlockManager(num_blocks=12, block_size=2)
    computed = [start(manager, sequence([5, 6, 7, 8, 9], cache_salt=salt)) for salt in (None, "a", "b")]
    assert len({block for seq in computed for block in seq.block_table}) == 9
    for seq in computed:
        assert take_prefix(manager, sequence([5, 6, 7, 8, 1], cache_salt=seq.cache_salt)) == 4


def test_a_freed_block_is_found_until_it_is_taken_and_the_least_recently_used_is_taken_first():
    manager = BlockManager(num_blocks=2, block_size=2)
    for prompt in ([1, 1], [2, 2]):
        manager.free(start(manager, sequence(prompt)))
    seq = sequence([1, 1, 9])
    assert take_prefix(manager, seq) == 2
    manager.free(seq)  # [1, 1] is now the more recently used
    manager.free(start(manager, sequence([3, 3])))
    assert len(manager.match_prefix([1, 1, 9])) == 1
    assert len(manager.match_prefix([2, 2, 9])) == 0


def test_a_block_after_an_evicted_one_is_found_only_when_the_whole_chain_is_there_again():
    """The block after an evicted prefix keeps its content, which is right for every prompt that begins so."""

    class HeadFirst(BlockManager):
        def choose_evicted(self, candidates):
            return max(candidates) if 0 not in candidates else 0  # the head of the chain first, against the usual order

    manager = HeadFirst(num_blocks=3, block_size=1)
    seq = start(manager, sequence([1, 2, 3]))
    first, second, third = seq.block_table
    manager.free(seq)
    other = start(manager, sequence([9]))
    assert other.block_table == [first]
    manager.free(other)
    assert len(manager.match_prefix([1, 2, 3, 4])) == 0
    manager.free(start(manager, sequence([1])))  # the head comes back, in the place of 9
    assert [block for _, block in manager.match_prefix([1, 2, 3, 4])] == [first, second, third]


def test_a_fork_shares_everything_and_copies_the_block_it_writes_into():
    manager = BlockManager(num_blocks=4, block_size=2)
    parent = start(manager, sequence([5, 6, 7]))
    child = sequence([5, 6, 7])
    manager.fork(parent, child)
    child.num_computed_tokens = 3
    assert child.block_table == [0, 1]
    assert manager.num_free_blocks == 2
    grow(child, 8)
    assert run(manager, child) == [(1, 2)]
    assert child.block_table == [0, 2]
    grow(parent, 9)
    assert run(manager, parent) == []  # nobody shares it any more
    manager.free(parent)
    manager.free(child)
    assert manager.num_free_blocks == 4


def test_explain_says_who_holds_a_block_and_when_it_is_evicted():
    manager = BlockManager(num_blocks=4, block_size=2)
    parent, child = start(manager, sequence([5, 6, 7], "r0")), sequence([5, 6, 7], "r1")
    manager.fork(parent, child)
    said = manager.explain(0, [parent, child])
    assert said.startswith("block 0: 2 references; tokens 0 to 1 of r0; tokens 0 to 1 of r1; in the prefix cache with key ")
    assert manager.explain(1, [parent]) == "block 1: 2 references; tokens 2 to 3 of r0"
    manager.free(parent)
    manager.free(child)
    assert manager.explain(0, []).endswith("reused after 0 others, when no block is empty")
    assert manager.explain(3, []) == "block 3: 0 references"


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(num_blocks=4, block_size=2, enable_prefix_caching=False)
    manager.free(start(manager, sequence([5, 6, 7])))
    assert take_prefix(manager, sequence([5, 6, 7])) == 0


class OwnBlocks(BlockMachine):
    """The machine for every class, and what is known of this one."""

    def check(self):
        super().check()
        held = [block for seq in self.alive for block in seq.block_table]
        assert self.manager.blocks.ref_counts == [held.count(block) for block in range(self.NUM_BLOCKS)]
        assert {*self.manager.blocks.empty, *self.manager.blocks.reusable} == set(range(self.NUM_BLOCKS)) - set(held)


def test_random_sequences_keep_every_token_and_lose_no_block():
    check_block_manager(BlockManager, OwnBlocks, max_examples=75)


def test_a_sequence_has_its_next_slot_if_allocating_would_change_nothing():
    manager = BlockManager(num_blocks=6, block_size=2)
    seq, prompt = start(manager, sequence([5, 6, 7])), start(manager, sequence([5, 5]))
    grow(seq, 8)
    grow(prompt, 1)
    assert manager.next_slots([seq, prompt]) == [True, False]  # a block is full
    child = sequence([5, 6, 7, 8])
    child.num_computed_tokens = 3
    manager.fork(seq, child)
    assert manager.next_slots([seq, child]) == [False, False]  # they share the block
    run(manager, seq)
    assert manager.next_slots([child, prompt]) == [True, False]
    start(manager, sequence([1, 2, 3, 4]))
    assert manager.num_free_blocks == 0
    assert manager.next_slots([child]) == [True]
    assert manager.next_slots([child, prompt]) is None  # no block is free
    child.num_computed_tokens -= 1
    assert manager.next_slots([child]) is None  # two new tokens


def test_the_blocks_of_a_sequence_that_failed_are_found_by_nobody():
    manager = BlockManager(num_blocks=8, block_size=2)
    other, failed = start(manager, sequence([5, 6, 7, 8, 9])), start(manager, sequence([5, 6, 1, 2, 3]))
    assert failed.block_table[0] == other.block_table[0]
    manager.forget_cached(failed)
    assert manager.match_prefix([5, 6, 7, 8, 9]) == manager.match_prefix([5, 6, 1, 2, 3]) == []
    assert len(other.block_table) == 3
    manager.free(failed)
    manager.free(other)
    assert manager.num_free_blocks == 8
