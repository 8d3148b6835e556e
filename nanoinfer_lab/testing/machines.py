"""Random loads of a Scheduler and a BlockManager, in longer runs and larger pools than those of schedules.py.

In: the classes, and Hypothesis (pip install hypothesis). Out: an AssertionError that says which rule a class breaks, under the
shortest run that was found.

The rules and the model of the memory are in rules.py. Whatever a run draws is an argument of a rule of Hypothesis, so that a
printed run is complete.
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
from nanoinfer_lab.testing.rules import Memory, names, run_step

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
        for seq, _ in plan.rows:
            scheduler.append(seq, (token_id + seq.index) % 2)
            if len(seq.token_ids) >= seq.max_num_tokens:
                scheduler.finish(seq)

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


def check_random_loads(
    scheduler_cls: type[Scheduler] = Scheduler,
    block_manager_cls: type[BlockManager] = BlockManager,
    machine: type[Load] = Load,
    **options: Any,
) -> None:
    """Check a subclass of Scheduler, of BlockManager, or both on random loads.

        def test_my_scheduler():
            check_random_loads(MyScheduler)

    Args:
        block_manager_cls: the class, or a staticmethod that returns an instance.
        machine: a subclass of Load with further rules.
        options: settings of Hypothesis, such as max_examples (default: 100 runs).

    Raises:
        AssertionError: a class breaks a rule, which the message states. Its notes are the shortest run that Hypothesis found.
        Exception: an error of the class itself, with the same notes.
    """
    classes = {"scheduler_cls": scheduler_cls, "block_manager_cls": block_manager_cls}
    run(type(machine.__name__, (machine,), classes), 30, **options)
