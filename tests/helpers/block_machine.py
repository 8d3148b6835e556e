"""A Hypothesis state machine for a BlockManager alone: sequences come, grow, fork and go without a scheduler."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.testing.machines import CHOICES, TOKENS, run
from nanoinfer_lab.testing.rules import Memory, names
from tests.helpers.growing import grow


class BlockMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go in any order."""

    block_manager_cls: type[BlockManager] = BlockManager
    memory_cls: type[Memory] = Memory
    NUM_BLOCKS, BLOCK_SIZE = 6, 2

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.block_manager_cls(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.alive: list[Sequence] = []
        self.memory = self.memory_cls(self.manager)
        self.num_sequences = 0

    def new_sequence(self, token_ids: list[int]) -> Sequence:
        self.num_sequences += 1
        return Sequence(str(self.num_sequences), list(token_ids), SamplingParams(), seed=0, max_num_tokens=1000)

    def chosen(self, choice: int) -> Sequence:
        return self.alive[choice % len(self.alive)]

    def compute(self, seq: Sequence) -> None:
        first, end = seq.num_computed_tokens, len(seq.token_ids)
        self.memory.copy(self.manager.allocate(seq, seq.num_new_tokens))
        self.memory.write(seq, first, end)
        seq.num_computed_tokens = end
        self.manager.cache_finished_blocks(seq, end)

    @rule(token_ids=st.lists(TOKENS, min_size=1, max_size=7))
    def add(self, token_ids: list[int]) -> None:
        seq = self.new_sequence(token_ids)
        prefix = self.manager.match_prefix(seq.token_ids)
        if self.manager.can_start(len(seq.token_ids), prefix):
            self.manager.start(seq, prefix)
            seq.num_computed_tokens = len(prefix) * self.BLOCK_SIZE
            self.compute(seq)
            self.alive.append(seq)
        self.check()

    @precondition(lambda self: bool(self.alive))
    @rule(choice=CHOICES, token_id=TOKENS)
    def grow(self, choice: int, token_id: int) -> None:
        seq = self.chosen(choice)
        grow(seq, token_id)
        if self.manager.can_allocate(seq, 1):
            self.compute(seq)
        else:
            seq.token_ids.pop()
            seq.num_tokens -= 1
        self.check()

    @precondition(lambda self: bool(self.alive))
    @rule(choice=CHOICES)
    def fork(self, choice: int) -> None:
        parent = self.chosen(choice)
        child = self.new_sequence(parent.token_ids)
        self.manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        self.alive.append(child)
        self.check()

    @precondition(lambda self: bool(self.alive))
    @rule(choice=CHOICES)
    def finish(self, choice: int) -> None:
        seq = self.chosen(choice)
        self.alive.remove(seq)
        self.manager.free(seq)
        self.check()

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.check()

    @precondition(lambda self: bool(self.alive))
    @rule(choice=CHOICES)
    def forget(self, choice: int) -> None:
        self.manager.forget_cached(self.chosen(choice))
        self.check()

    def check(self) -> None:
        """Check that every token is where its block table says, and that the blocks in no block table are free."""
        for seq in self.alive:
            self.memory.check(seq, seq.num_computed_tokens)
        held = {block for seq in self.alive for table, _ in self.manager.named_tables(seq) for block in table} - {-1}
        num_free, expected = self.manager.num_free_blocks, self.NUM_BLOCKS - len(held)
        assert num_free == expected, (
            f"num_free_blocks must be {expected}, because the block tables of {names(self.alive) or 'no sequence'} have "
            f"{len(held)} of {self.NUM_BLOCKS} blocks, got {num_free}"
        )

    def teardown(self) -> None:
        for seq in self.alive:
            self.manager.free(seq)
        num_free = self.manager.num_free_blocks
        assert num_free == self.NUM_BLOCKS, (
            f"after every sequence was freed, {self.NUM_BLOCKS} blocks must be free, got {num_free}"
        )


def check_block_manager(block_manager_cls, machine=BlockMachine, **options):
    """Check a BlockManager, a class or a staticmethod that returns an instance, with BlockMachine or a subclass."""
    run(type(machine.__name__, (machine,), {"block_manager_cls": block_manager_cls}), 40, **options)
