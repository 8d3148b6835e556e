"""Whatever the policy: the tokens stay the same, no request waits for ever, and at the end every block is free."""

import random

import pytest

from examples.least_frequently_hit import LeastFrequentlyHit
from examples.shortest_job_first import ShortestJobFirst
from nanoinfer import LLM, SamplingParams
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import InvalidTypeError
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.policies import DeadlineScheduler, PreemptingScheduler, PriorityScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.testing import machines
from tests.helpers.block_machine import check_block_manager
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.told import Told
from tests.lab.testing.worlds import PreemptsAlways


class Contrary(Scheduler):
    """The last comes first, the oldest is preempted, nothing is reserved, and every other start is refused."""

    num_asked = 0

    def order_waiting(self, waiting):
        return reversed(waiting)

    def may_start(self, seq):
        self.num_asked += 1
        return not self.running or self.num_asked % 2 == 0

    def num_reserved_blocks(self, seq):
        return 0

    def choose_victim(self, running, seq):
        return running[0]


class SelfSacrificing(Scheduler):
    """Whoever lacks a block gives its own back."""

    def num_reserved_blocks(self, seq):
        return 0

    def choose_victim(self, running, seq):
        return seq


class AtRandom(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.random = random.Random(0)

    def order_waiting(self, waiting):
        return self.random.sample(list(waiting), len(waiting))

    def choose_victim(self, running, seq):
        return self.random.choice(running)


class PreemptivePriority(PreemptingScheduler, PriorityScheduler):
    """A waiting sequence with a lower number takes the place of the running one with the highest."""

    def to_preempt(self, running, waiting):
        worst = self.choose_victim(running, waiting[0])
        return worst if worst.priority > waiting[0].priority else None


class MostRecentlyUsed(BlockManager):
    def choose_evicted(self, candidates):
        return list(candidates)[-1]


SCHEDULERS = [PriorityScheduler, DeadlineScheduler, ShortestJobFirst, Contrary, SelfSacrificing, AtRandom]
SCHEDULERS += [PreemptivePriority, PreemptsAlways]
BLOCK_MANAGERS = [LeastFrequentlyHit, MostRecentlyUsed]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler_cls", SCHEDULERS)
def test_a_scheduler_keeps_every_rule_under_random_loads(scheduler_cls):
    machines.check_random_loads(scheduler_cls, max_examples=8)


@pytest.mark.slow
@pytest.mark.parametrize("block_manager_cls", BLOCK_MANAGERS)
def test_a_block_manager_keeps_every_token_and_loses_no_block(block_manager_cls):
    check_block_manager(block_manager_cls, max_examples=8)
    machines.check_random_loads(Contrary, block_manager_cls, max_examples=8)


# ---- in the engine

PROMPTS = ["Once upon a time", "Lily was", "Tom had a red ball. One day", "Once upon a time there", "The dog", "Lily was a"]
PARAMS = [
    SamplingParams(temperature=0.8, seed=i, max_tokens=10 + 4 * i, ignore_eos=True, n=1 + i % 2, timeout=1000.0 - i)
    for i in range(len(PROMPTS))
]


BYTES_PER_BLOCK = 9216  # of tiny-qwen3, for 4 tokens in float32


def run(num_blocks=None, **classes):
    """The tokens of the prompts, and how often they were preempted. num_blocks: of 4 tokens. None: enough for all."""
    memory = 2**24 if num_blocks is None else num_blocks * BYTES_PER_BLOCK
    llm = LLM(device="cpu", block_size=4, max_model_len=90, dtype="float32", kv_cache_memory=memory, **classes)
    assert llm.info.num_cache_bytes == llm.info.num_blocks * BYTES_PER_BLOCK
    accepts = llm.engine.scheduler.reads_priority
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=[2, 0, 1, 0, 2, 1] if accepts else None)
    assert llm.engine.block_manager.num_free_blocks == llm.engine.block_manager.num_blocks
    assert llm.engine.scheduler.num_unfinished == 0
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    return [[answer.token_ids for answer in output.outputs] for output in outputs], num_preemptions


@pytest.fixture(scope="module")
def expected():
    return run()[0]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler_cls", [PriorityScheduler, Contrary, SelfSacrificing, PreemptsAlways])
def test_the_tokens_are_the_same_under_every_scheduler(scheduler_cls, expected):
    tokens, num_preemptions = run(num_blocks=30, scheduler_cls=scheduler_cls)
    assert tokens == expected
    assert num_preemptions > 0


@pytest.mark.slow
def test_the_tokens_are_the_same_under_another_block_manager(expected):
    assert run(num_blocks=30, block_manager_cls=MostRecentlyUsed)[0] == expected


# ---- by hand


def engine(config=None, **executor):
    config = SchedulerConfig(max_num_seqs=1, **(config or {}))
    return LLMEngine(FakeExecutor(**executor), EngineConfig(scheduler=config, seed=0))


def order_of(engine, requests):
    """Step until all requests have ended. Returns their places in the order of their ends."""
    ended = []
    while len(ended) < len(requests):
        engine.step()
        ended += [i for i, request in enumerate(requests) if request.output and i not in ended]
    return ended


def test_with_the_policy_priority_the_lowest_runs_first_and_equal_ones_in_order():
    one = engine({"scheduling_policy": "priority"})
    params = SamplingParams(max_tokens=2, detokenize=False)
    requests = [one.submit(one.inputs.prepare([5], params, priority=priority)) for priority in (3, 0, -1, 0, 3)]
    assert order_of(one, requests) == [2, 1, 3, 0, 4]


def test_with_the_policy_deadline_the_earliest_runs_first_and_none_is_last():
    one = engine({"scheduling_policy": "deadline"})
    times = (None, 3000.0, 1000.0, None, 2000.0)
    requests = [one.add_request([5], SamplingParams(max_tokens=2, detokenize=False, timeout=time)) for time in times]
    assert order_of(one, requests) == [2, 4, 1, 0, 3]


def test_the_lowest_priority_is_preempted_also_if_it_was_scheduled_in_the_same_step():
    """5 blocks of 2 tokens: each has 2 after its prompt of 3. low takes the last one, and then high needs one, too."""
    scheduler = PriorityScheduler(SchedulerConfig(), BlockManager(5, 2), Told())
    low, high = (
        Sequence(name, [first, first + 1, first + 2], SamplingParams(), seed=0, max_num_tokens=9, priority=priority)
        for name, first, priority in (("low", 0, 2), ("high", 10, 0))
    )
    plans = []
    while not scheduler.observer.preempted:
        if len(plans) < 2:
            scheduler.add((low, high)[len(plans)])  # low is the older one
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1])
        for seq, _ in plans[-1].rows:
            scheduler.append(seq, 7)
    both = ["low", "high"]
    assert [[item.sequence.request_id for item in plan.scheduled] for plan in plans] == [["low"], both, both, ["high"]]


# ---- timeouts


def steps_of(scheduler_cls, *given, num_blocks=4, **config):
    """Who runs and who is preempted in each step, at most 60. given: (step of the arrival, prompt, output, priority)."""
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "chunk_size": 4} | config
    manager = BlockManager(num_blocks, 4, enable_prefix_caching=False)
    scheduler = scheduler_cls(SchedulerConfig(**config), manager, Told())
    steps = []
    for number in range(60):
        for name, (step, num_prompt, num_output, priority) in enumerate(given):
            if step == number:
                total = num_prompt + num_output
                seq = Sequence(str(name), [1] * num_prompt, SamplingParams(), 0, max_num_tokens=total, priority=priority)
                scheduler.add(seq)
        plan = scheduler.schedule()
        names = [seq.request_id for seq in scheduler.observer.preempted]
        steps.append(([item.sequence.request_id for item in plan.scheduled], names))
        scheduler.observer.preempted.clear()
        scheduler.commit(plan)
        for seq, _ in plan.rows:
            scheduler.append(seq, 7)
            if len(seq.token_ids) == seq.max_num_tokens:
                scheduler.finish(seq)
        if not scheduler.num_unfinished:
            break
    assert scheduler.num_unfinished or scheduler.block_manager.num_free_blocks == num_blocks
    return steps, scheduler.num_unfinished


def test_a_waiting_sequence_takes_the_place_of_one_with_a_lower_priority_in_the_same_step():
    given = (0, 4, 8, 5), (2, 4, 3, 0), (3, 4, 3, 5)
    for config in ({"max_num_seqs": 1}, {"num_blocks": 3}):  # no place, or no blocks
        steps, num_unfinished = steps_of(PreemptivePriority, *given, **config)
        assert steps[:4] == [(["0"], []), (["0"], []), (["1"], ["0"]), (["1"], [])]
        assert num_unfinished == 0
    steps, _ = steps_of(PriorityScheduler, *given, max_num_seqs=1)  # the negative control: without the hook it waits
    assert all(not preempted for _, preempted in steps)
    assert steps[2] == (["0"], [])


def test_nobody_is_preempted_for_a_sequence_that_lacks_room_even_then():
    steps, num_unfinished = steps_of(PreemptivePriority, (0, 1, 2, 9), (0, 4, 8, 1), (1, 12, 4, 0), num_blocks=4)
    assert num_unfinished == 0
    assert steps[1][1] == []  # the one with the highest number has a block, and the prompt needs three more


def test_a_sequence_is_preempted_for_another_only_after_a_new_token_because_else_nobody_ends():
    class WithoutTheRule(PreemptsAlways):
        def may_be_preempted(self, seq):
            return True

    given = [(0, 8, 4, 0), (0, 8, 4, 0)]  # prompts of two chunks, of which each step computes one
    assert steps_of(WithoutTheRule, *given, max_num_seqs=1)[1] == 2
    assert steps_of(PreemptsAlways, *given, max_num_seqs=1)[1] == 0


def test_a_request_ends_at_its_timeout_waiting_or_running_and_keeps_its_text(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("nanoinfer.engine.llm_engine.time.perf_counter", lambda: now[0])
    one = engine(max_model_len=64)
    in_time = one.add_request([4], SamplingParams(max_tokens=1, detokenize=False, timeout=5))
    assert one.step() == [in_time]
    params = SamplingParams(max_tokens=20, detokenize=False, timeout=5)
    running, waiting = one.add_request([5], params), one.add_request([6], params)
    unhurried = one.add_request([7], SamplingParams(max_tokens=2, detokenize=False))
    for _ in range(3):
        one.step()
    now[0] = 104.9
    assert one.step() == []
    now[0] = 105.0
    assert one.step() == [running, waiting]
    for request, token_ids in ((running, [6, 7, 8, 9]), (waiting, [])):
        [answer] = request.output.outputs
        assert (answer.finish_reason, answer.token_ids) == ("timeout", token_ids)
        assert answer.error == "the request took longer than its timeout of 5 s"
    order_of(one, [unhurried])
    assert in_time.output.outputs[0].finish_reason == unhurried.output.outputs[0].finish_reason == "length"
    assert one.block_manager.num_free_blocks == one.block_manager.num_blocks


# ---- the classes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_manager_cls": Scheduler}, "must be a subclass of BlockManager"),
        ({"scheduler_cls": dict}, "must be a subclass of Scheduler"),
        (
            {"scheduler_cls": type("Mine", (Scheduler,), {"to_preempt": lambda self, running, waiting: None})},
            "must be a subclass of PreemptingScheduler .*policies.py.*, because it has to_preempt, got .*Mine",
        ),
    ],
)
def test_a_class_of_another_kind_is_refused_before_a_model_is_loaded(arguments, words):
    with pytest.raises(InvalidTypeError, match=words):
        LLM("no such model", **arguments)


@pytest.mark.parametrize("point", ["order_waiting", "may_start", "num_reserved_blocks", "choose_evicted"])
def test_after_a_policy_that_raises_every_request_is_served(point):
    """An error of a policy is the caller's to see. The engine requeues all requests, as after any failed step."""
    owner, failing = BlockManager if point == "choose_evicted" else Scheduler, []

    def method(self, *args):
        if failing:
            raise LookupError(failing.pop())
        return getattr(owner, point)(self, *args)

    mine = type("Mine", (owner,), {point: method})
    scheduler = SchedulerConfig(scheduler_cls=mine if owner is Scheduler else None, max_num_seqs=2)
    cache = CacheConfig(block_manager_cls=mine if owner is BlockManager else None)
    one = LLMEngine(FakeExecutor(num_blocks=8, block_size=2, max_model_len=16), EngineConfig(scheduler=scheduler, cache=cache))
    params = SamplingParams(max_tokens=6, detokenize=False)
    for first in (5, 30, 60):  # fills the prefix cache
        order_of(one, [one.add_request(list(range(first, first + 6)), params)])
    requests = [one.add_request(list(range(first, first + 6)), params) for first in (100, 200, 300)]
    failing.append("my own fault")
    with pytest.raises(LookupError, match="my own fault"):
        order_of(one, requests)
    order_of(one, requests)
    assert [request.output.outputs[0].token_ids[0] for request in requests] == [106, 206, 306]
    assert one.block_manager.num_free_blocks == 8
