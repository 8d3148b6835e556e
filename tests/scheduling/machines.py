"""Hypothesis state machines that check any subclass of BlockManager and of Scheduler: the invariants that no policy may break.

Both keep a model of the memory: what a real cache would hold in each slot. A token's keys and values depend on all tokens
before it, so a slot holds the tuple of these. If every slot that a step reads holds what it should, the tokens are those of any
other policy. Use them on a class of your own:

    pytest tests/scheduling/test_policies.py --scheduler-cls my_module.MyScheduler --block-manager-cls my_module.MyBlocks

or, in a test of your own, with `from tests.scheduling.machines import check_scheduler` and `check_scheduler(MyScheduler)`. Only
public names of the two classes are used.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from nanoinfer.config import SchedulerConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus

SETTINGS = {"max_examples": 100, "deadline": None, "report_multiple_bugs": False}


class Memory:
    """The slots of a cache."""

    def __init__(self, manager):
        self.manager = manager
        self.slots = [None] * (manager.num_blocks * manager.block_size)

    def slot(self, seq, i):
        return seq.block_table[i // self.manager.block_size] * self.manager.block_size + i % self.manager.block_size

    def copy(self, copies):
        for source, target in copies:
            for offset in range(self.manager.block_size):
                size = self.manager.block_size
                self.slots[target * size + offset] = self.slots[source * size + offset]

    def write(self, seq, first, end):
        for i in range(first, end):
            self.slots[self.slot(seq, i)] = tuple(seq.token_ids[: i + 1])

    def check(self, seq, end):
        """Every one of the sequence's first `end` tokens is where its block table says."""
        for i in range(end):
            assert self.slots[self.slot(seq, i)] == tuple(seq.token_ids[: i + 1])

    def capacity(self):
        """The tokens of the longest sequence that fits alone."""
        return self.manager.num_blocks * self.manager.block_size

    def held(self, seq):
        return set(seq.block_table)


class Blocks(RuleBasedStateMachine):
    """Sequences come, grow, fork and go in any order."""

    block_manager_cls = BlockManager
    memory_cls = Memory
    NUM_BLOCKS, BLOCK_SIZE = 6, 2

    def __init__(self):
        super().__init__()
        self.manager = self.block_manager_cls(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.alive = []
        self.memory = self.memory_cls(self.manager)

    def compute(self, seq):
        first, end = seq.num_computed_tokens, len(seq.token_ids)
        self.memory.copy(self.manager.allocate(seq, seq.num_new_tokens))
        self.memory.write(seq, first, end)
        seq.num_computed_tokens = end
        self.manager.cache_finished_blocks(seq, end)

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def add(self, token_ids):
        seq = Sequence("r", token_ids, SamplingParams(), seed=0, max_num_tokens=1000)
        prefix = self.manager.match_prefix(seq.token_ids)
        if self.manager.can_start(len(seq.token_ids), prefix):
            self.manager.start(seq, prefix)
            seq.num_computed_tokens = len(prefix) * self.BLOCK_SIZE
            self.compute(seq)
            self.alive.append(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def grow(self, data, token_id):
        seq = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        seq.token_ids.append(token_id)
        if self.manager.can_allocate(seq, 1):
            self.compute(seq)
        else:
            seq.token_ids.pop()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        child = Sequence("r", list(parent.token_ids), SamplingParams(), seed=0, max_num_tokens=1000)
        self.manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        self.alive.append(child)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def finish(self, data):
        seq = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        self.alive.remove(seq)
        self.manager.free(seq)

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def forget(self, data):
        self.manager.forget_cached(self.alive[data.draw(st.integers(0, len(self.alive) - 1))])

    @invariant()
    def every_token_is_where_its_block_table_says(self):
        for seq in self.alive:
            self.memory.check(seq, seq.num_computed_tokens)

    @invariant()
    def a_block_is_free_if_no_block_table_has_it(self):
        held = {block for seq in self.alive for block in self.memory.held(seq)}
        assert self.manager.num_free_blocks == self.NUM_BLOCKS - len(held)

    def teardown(self):
        for seq in self.alive:
            self.manager.free(seq)
        assert self.manager.num_free_blocks == self.NUM_BLOCKS


class Load(RuleBasedStateMachine):
    """Requests arrive and are aborted while steps run. Whatever the pool and the budgets, each step keeps the rules."""

    scheduler_cls = Scheduler
    block_manager_cls = BlockManager
    memory_cls = Memory

    @initialize(
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        chunk_size=st.integers(1, 12),
    )
    def begin(self, num_blocks, block_size, max_num_seqs, budget, chunk_size):
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, chunk_size=chunk_size)
        manager = self.block_manager_cls(num_blocks, block_size)
        self.scheduler = self.scheduler_cls(config, manager)
        self.memory = self.memory_cls(manager)
        self.arrived = []
        self.num_requests = 0

    @property
    def unfinished(self):
        return [seq for seq in self.arrived if seq.status is not SequenceStatus.FINISHED]

    @rule(data=st.data(), n=st.integers(1, 3), priority=st.integers(0, 2), seconds=st.sampled_from([1.0, 2.0, float("inf")]))
    def arrive(self, data, n, priority, seconds):
        capacity = self.memory.capacity()
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=capacity - 1))
        total = data.draw(st.integers(len(prompt) + 1, capacity))
        self.num_requests += 1
        times = {"arrival_time": float(self.num_requests), "deadline": self.num_requests + seconds}
        first, *forks = [
            Sequence(
                str(self.num_requests), list(prompt), SamplingParams(), seed=index, max_num_tokens=total, index=index,
                priority=priority, **times,
            )
            for index in range(n)
        ]  # fmt: skip
        first.forks = forks
        self.arrived += [first, *forks]
        self.scheduler.add(first)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from([seq.request_id for seq in self.unfinished]))
        for seq in self.arrived:
            if seq.request_id == request_id:
                self.scheduler.finish(seq)

    @precondition(lambda self: self.unfinished)
    @rule(token_id=st.integers(0, 1))
    def step(self, token_id):
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        was_decoding = [seq for seq in self.unfinished if seq.status is SequenceStatus.RUNNING and seq.num_new_tokens == 1]
        plan = scheduler.schedule()
        scheduled = {item.sequence: item.num_new_tokens for item in plan.scheduled}
        assert scheduled or plan.preempted, "a step without progress"
        assert all(seq in scheduled or seq in plan.preempted for seq in was_decoding)
        assert not scheduled.keys() & set(plan.preempted)
        assert plan.num_prefill_tokens <= scheduler.config.max_num_batched_tokens
        running = [seq for seq in self.unfinished if seq.status is SequenceStatus.RUNNING]
        assert len(running) == len(scheduler.running) <= scheduler.config.max_num_seqs
        self.check_order()
        self.memory.copy(plan.block_copies)
        for seq, num_new in scheduled.items():
            end = seq.num_computed_tokens + num_new
            assert end == len(seq.token_ids) or end % scheduler.config.chunk_grid == 0
            assert len(seq.block_table) * manager.block_size >= end
            self.memory.write(seq, seq.num_computed_tokens, end)
        for seq, num_new in scheduled.items():
            self.memory.check(seq, seq.num_computed_tokens + num_new)
        scheduler.commit(plan)
        for seq, _ in plan.rows:
            scheduler.append(seq, (token_id + seq.index) % 2)
            if len(seq.token_ids) >= seq.max_num_tokens:
                scheduler.finish(seq)

    def check_order(self):
        """For subclasses of this machine that know the order of their policy."""

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Whoever preempts, a sequence has a new token since its start, and a start computes at most all of its tokens again.
        most_steps = sum(seq.max_num_tokens**2 for seq in self.unfinished)
        for _ in range(most_steps):
            if not self.unfinished:
                break
            self.step(0)
        assert not self.unfinished, "the scheduler never finishes"
        assert self.scheduler.num_unfinished == 0
        assert self.scheduler.block_manager.num_free_blocks == self.scheduler.block_manager.num_blocks


def check_block_manager(block_manager_cls, machine=Blocks, **more):
    """Run the machine of blocks on a subclass of BlockManager, with `more` settings of Hypothesis.

    Raises: AssertionError, or what the class raises, after printing the shortest run that fails.
    """
    machine = type(machine.__name__, (machine,), {"block_manager_cls": block_manager_cls})
    run_state_machine_as_test(machine, settings=settings(**{"stateful_step_count": 40} | SETTINGS | more))


def check_scheduler(scheduler_cls, block_manager_cls=BlockManager, machine=Load, **more):
    """Run the machine of loads on a subclass of Scheduler, as check_block_manager does."""
    classes = {"scheduler_cls": scheduler_cls, "block_manager_cls": block_manager_cls}
    machine = type(machine.__name__, (machine,), classes)
    run_state_machine_as_test(machine, settings=settings(**{"stateful_step_count": 30} | SETTINGS | more))
