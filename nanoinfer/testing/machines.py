"""Hypothesis state machines that check any subclass of BlockManager and of Scheduler: the rules that no policy may break.

In: a class, and Hypothesis (pip install hypothesis). Out: an AssertionError that says which rule the class breaks, under the
shortest run that breaks it.

Both machines keep the model of the memory in rules.py. Whatever a run draws is an argument of a rule, so that a printed run is
complete. For every run of a small world, see schedules.py.
"""

from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from nanoinfer.config import SchedulerConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.testing.rules import Memory, names, run_step

SETTINGS: dict[str, Any] = {
    "max_examples": 100,
    "deadline": None,
    "database": None,  # which would repeat the runs of other classes, and as they are, without making them shorter
    "report_multiple_bugs": False,
    "print_blob": False,
    "phases": [Phase.generate, Phase.shrink],  # without a list of the lines that failing runs share
}
TOKENS = st.integers(0, 1)  # few ids, so that prefixes are equal often
FEW_RULES = 6
CHOICES = st.integers(0, 9)  # of a sequence: its index, modulo their number


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
        seq.token_ids.append(token_id)
        if self.manager.can_allocate(seq, 1):
            self.compute(seq)
        else:
            seq.token_ids.pop()
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
        held = {block for seq in self.alive for block in self.memory.held(seq)}
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


class Load(RuleBasedStateMachine):
    """Requests arrive and are aborted while steps run. Whatever the pool and the budgets, each step keeps the rules."""

    scheduler_cls: type[Scheduler] = Scheduler
    block_manager_cls: type[BlockManager] = BlockManager
    memory_cls: type[Memory] = Memory

    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        chunk_size=st.integers(1, 12),
    )
    def begin(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, chunk_size: int) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, chunk_size=chunk_size)
        self.begin_with(config, self.block_manager_cls(num_blocks, block_size))

    def begin_with(self, config: SchedulerConfig, manager: BlockManager) -> None:
        self.scheduler = self.scheduler_cls(config, manager)
        self.memory = self.memory_cls(manager)
        self.arrived: list[Sequence] = []
        self.num_requests = 0

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.arrived if seq.status is not SequenceStatus.FINISHED]

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=40),
        num_new=st.integers(1, 40),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        seconds=st.sampled_from([1.0, 2.0, float("inf")]),
    )
    def arrive(self, prompt: list[int], num_new: int, n: int, priority: int, seconds: float) -> None:
        """Add a request. What does not fit into the memory alone is cut off."""
        capacity = self.memory.capacity()
        prompt = prompt[: capacity - 1]
        self.num_requests += 1
        first, *forks = [
            Sequence(
                str(self.num_requests),
                list(prompt),
                SamplingParams(),
                seed=index,
                max_num_tokens=min(len(prompt) + num_new, capacity),
                index=index,
                priority=priority,
                arrival_time=float(self.num_requests),
                deadline=self.num_requests + seconds,
            )
            for index in range(n)
        ]
        first.forks = forks
        self.arrived += [first, *forks]
        self.scheduler.add(first)

    @precondition(lambda self: bool(self.unfinished))
    @rule(choice=CHOICES)
    def abort(self, choice: int) -> None:
        request_id = self.unfinished[choice % len(self.unfinished)].request_id
        for seq in self.arrived:
            if seq.request_id == request_id:
                self.scheduler.finish(seq)

    @precondition(lambda self: bool(self.unfinished))
    @rule(token_id=TOKENS)
    def step(self, token_id: int) -> None:
        scheduler = self.scheduler
        plan = run_step(scheduler, self.memory, self.unfinished)
        self.check_order()
        for seq, _ in plan.rows:
            scheduler.append(seq, (token_id + seq.index) % 2)
            if len(seq.token_ids) >= seq.max_num_tokens:
                scheduler.finish(seq)

    def check_order(self) -> None:
        """For subclasses of this machine that know the order of their policy."""

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Whoever preempts, a sequence has a new token since its start, and a start computes at most all of its tokens again.
        most_steps = sum(seq.max_num_tokens**2 for seq in self.unfinished)
        for _ in range(most_steps):
            if not self.unfinished:
                break
            self.step(0)
        assert not self.unfinished, f"every sequence must end: after {most_steps} steps {names(self.unfinished)} have not"
        num_unfinished, manager = self.scheduler.num_unfinished, self.scheduler.block_manager
        assert num_unfinished == 0, f"after every sequence has ended, num_unfinished must be 0, got {num_unfinished}"
        num_free, num_blocks = manager.num_free_blocks, manager.num_blocks
        assert num_free == num_blocks, f"after every sequence has ended, {num_blocks} blocks must be free, got {num_free}"


def run(machine: type[RuleBasedStateMachine], num_rules: int, **options: Any) -> None:
    """Run a machine: first a few of its rules at a time, because Hypothesis does not make long runs short, then num_rules."""
    for num in (FEW_RULES, num_rules):
        run_state_machine_as_test(machine, settings=settings(stateful_step_count=num, **SETTINGS | options))


def check_block_manager(
    block_manager_cls: type[BlockManager], machine: type[BlockMachine] = BlockMachine, **options: Any
) -> None:
    """Check a subclass of BlockManager on sequences that come, grow, fork and go at random.

        def test_my_block_manager():
            check_block_manager(MyBlockManager)

    Args:
        block_manager_cls: the class, or a staticmethod that returns an instance.
        machine: a subclass of BlockMachine with further rules.
        options: settings of Hypothesis, such as max_examples (default: 100 runs).

    Raises:
        AssertionError: the class breaks a rule, which the message states. Its notes are the shortest run that Hypothesis found.
        Exception: an error of the class itself, with the same notes.
    """
    machine = type(machine.__name__, (machine,), {"block_manager_cls": block_manager_cls})
    run(machine, 40, **options)


def check_scheduler(
    scheduler_cls: type[Scheduler],
    block_manager_cls: type[BlockManager] = BlockManager,
    machine: type[Load] = Load,
    **options: Any,
) -> None:
    """Check a subclass of Scheduler on random loads. The arguments and errors are as for check_block_manager."""
    classes = {"scheduler_cls": scheduler_cls, "block_manager_cls": block_manager_cls}
    machine = type(machine.__name__, (machine,), classes)
    run(machine, 30, **options)
