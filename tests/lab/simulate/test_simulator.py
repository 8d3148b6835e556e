"""The simulator: hand-checked times, steps advanced together against single steps, no lost block, policies, no torch."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.policies import PriorityScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer_lab.bench.workloads import Workload
from nanoinfer_lab.simulate.costs import ModelSizes
from nanoinfer_lab.simulate.hardware import Hardware, Overheads
from nanoinfer_lab.simulate.simulator import SimulatedRequest, TimeCounts, requests_of, simulate

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 4096,
}  # fmt: skip
SIZES = ModelSizes.of(CONFIG)
WINDOWS = ModelSizes.of(
    CONFIG | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 40, "sliding_window_pattern": 2}
)
# Nothing but overheads takes time: a step 1 s, a sequence in it 0.01 s.
SLOW_HOST = Hardware(
    name="slow host", bandwidth=math.inf, rates={"float32": math.inf}, memory_bytes=2**30, is_gpu=False,
    overheads=Overheads(per_step_s=1.0, per_sequence_s=0.01),
)  # fmt: skip
REAL = replace(SLOW_HOST, bandwidth=1e8, rates={"float32": 1e9}, overheads=Overheads(1e-4, 1e-5, 1e-3, 1e-3))


def request(arrival_s, prompt_len, output_len, first_id=1, **more):
    return SimulatedRequest(arrival_s=arrival_s, prompt=[first_id] * prompt_len, output_len=output_len, **more)


def random_requests(num, seed, rate=400.0, shared=48):
    """Requests of which half begin with one of three prompts, some with a limit above the length of their answer."""
    rng, now = random.Random(seed), 0.0
    for number in range(num):
        prefix = [rng.randrange(3)] * (shared if rng.random() < 0.5 else 0)
        output_len = rng.randint(1, 60)
        yield SimulatedRequest(
            arrival_s=now,
            prompt=prefix + [1000 + number] * rng.randint(1, 90),
            output_len=output_len,
            max_tokens=output_len + rng.choice((0, 0, 40)),
            priority=rng.randrange(3),
        )
        now += rng.expovariate(rate)


def test_two_requests_have_the_times_of_their_steps():
    """The second arrives in the first step, so its prompt is computed beside the first's second token."""
    result = simulate(SIZES, SLOW_HOST, EngineArgs(), [request(0.0, 5, 3), request(0.5, 5, 2, first_id=2)])
    first, second = result.timings
    assert first.token_times == pytest.approx([1.01, 1.01 + 1.02 + 1.02])
    assert second.token_times == pytest.approx([1.01 + 1.02, 1.01 + 1.02 + 1.02])
    assert (first.num_output_tokens, second.num_output_tokens, result.num_steps) == (3, 2, 3)
    assert result.figures().ttft_ms.p50 == pytest.approx((1010 + 1530) / 2)
    assert result.figures().itl_ms.p50 == pytest.approx(1020, rel=1e-3)


def test_a_step_takes_the_time_of_its_bytes():
    hardware = replace(SLOW_HOST, bandwidth=1e6, overheads=Overheads())
    [timing] = simulate(SIZES, hardware, EngineArgs(), [request(0.0, 1, 1)]).timings
    weights = SIZES.num_weights - 100 * 64  # the embedding is looked up
    one_token = 64 + 2 * 2 * 2 * 2 * 16 + 100  # its row, its keys and values written and read, its logits
    assert timing.ttft == pytest.approx(4 * (weights + one_token) / 1e6)


def test_requests_pass_the_server_one_after_another_and_answers_come_later():
    hardware = replace(SLOW_HOST, overheads=replace(SLOW_HOST.overheads, per_request_s=0.25, per_answer_s=0.1))
    timings = simulate(SIZES, hardware, EngineArgs(), [request(0.0, 5, 1), request(0.0, 5, 1, first_id=2)]).timings
    assert [timing.ttft for timing in timings] == pytest.approx([0.25 + 1.01 + 0.1, 0.25 + 1.01 + 1.01 + 0.1])


def test_with_async_scheduling_the_host_works_while_the_device_computes():
    """A step takes 1 s of the host and 1 s of the device. Its tokens are known a step later."""
    hardware = replace(SLOW_HOST, bandwidth=1.0, overheads=Overheads(per_step_s=1.0))
    plain, overlapped, ends_early = (
        simulate(SIZES, hardware, EngineArgs(async_scheduling=is_async), [request(0.0, 1, 4, max_tokens=most)])
        for is_async, most in ((False, 4), (True, 4), (True, 9))
    )
    assert overlapped.timings[0].token_times[0] == pytest.approx(plain.timings[0].token_times[0])
    assert overlapped.timings[0].tpot == pytest.approx(plain.timings[0].tpot - 1.0)
    assert overlapped.num_steps == 4  # max_tokens is known, so no token is computed in vain
    assert ends_early.num_steps == 5  # the step after the last token was planned before it was known


@pytest.mark.parametrize("sizes", [SIZES, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_steps_that_are_advanced_together_have_the_figures_of_single_steps(sizes, is_async):
    for settings in (
        {"max_num_seqs": 3},
        {"kv_cache_memory": 400_000},
        {"kv_cache_memory": 400_000, "enable_prefix_caching": False},
        {"chunk_size": 32, "max_num_batched_tokens": 64},
        {"scheduling_policy": "priority", "max_num_seqs": 4},
    ):
        args = EngineArgs(block_size=8, max_model_len=256, async_scheduling=is_async, **settings)
        plans = []
        together = simulate(sizes, REAL, args, random_requests(60, seed=1))
        single = simulate(sizes, REAL, args, random_requests(60, seed=1), on_step=lambda plan, *_: plans.append(plan))  # noqa: B023
        assert together.timings == single.timings, settings
        assert (together.num_steps, together.counts) == (single.num_steps, single.counts), settings
        assert together.inter_token_s.counts == single.inter_token_s.counts, settings
        assert together.device_s == pytest.approx(single.device_s), settings
        assert sum(bool(plan.scheduled) for plan in plans) == single.num_steps, settings


def test_those_comparisons_preempt_hit_the_cache_and_advance():
    """So that they compare something."""
    small = EngineArgs(block_size=8, max_model_len=256, kv_cache_memory=400_000)
    counts = simulate(SIZES, REAL, small, random_requests(60, seed=1)).counts
    assert min(counts.values()) > 0
    calls = []

    class Counting(Scheduler):
        def order_waiting(self, waiting):
            calls.append(1)
            return waiting

    steps = simulate(SIZES, REAL, EngineArgs(scheduler_cls=Counting), random_requests(60, seed=1)).num_steps
    assert 0 < len(calls) < steps / 2


def test_a_policy_of_ones_own_decides_by_priority_or_the_virtual_clock_and_a_block_manager_evicts():
    """With one place, the requests of low priority numbers start first, whenever they came."""
    requests = [request(0.1 * i, 5, 2, first_id=i, priority=10 - i) for i in range(5)]
    settings = EngineArgs(max_num_seqs=1, scheduler_cls=PriorityScheduler)
    firsts = [timing.token_times[0] for timing in simulate(SIZES, SLOW_HOST, settings, requests).timings]
    assert sorted(range(5), key=firsts.__getitem__) == [0, 4, 3, 2, 1]
    seen, evicted = [], []

    class Late(Scheduler):
        def order_waiting(self, waiting):
            seen.append(self.clock())
            return waiting

    class Newest(BlockManager):
        def choose_evicted(self, candidates):
            evicted.append(1)
            return next(reversed(candidates))

    small = {"block_size": 8, "kv_cache_memory": 400_000, "max_model_len": 256}
    settings = EngineArgs(scheduler_cls=Late, block_manager_cls=Newest, **small)
    result = simulate(SIZES, REAL, settings, random_requests(60, seed=1))
    assert seen == sorted(seen)
    assert 0 <= seen[0] < seen[-1] <= result.end_s
    assert evicted


def test_a_later_turn_finds_the_answer_before_it_in_the_prefix_cache():
    first = SimulatedRequest(arrival_s=0.0, prompt=[7] * 16, output_len=17)
    second = SimulatedRequest(arrival_s=100.0, prompt=[7] * 16 + [0] * 17 + [8] * 5, output_len=1)
    counts = simulate(SIZES, SLOW_HOST, EngineArgs(block_size=8), [first, second]).counts
    assert counts["prefix_cache_hits"] == 32  # of 16 + 17 tokens, those in full blocks
    assert counts["prefix_cache_queries"] == 16 + 38


def test_received_tokens_cost_nothing_until_their_sequence_is_preempted():
    hardware = replace(SLOW_HOST, bandwidth=math.inf, rates={"float32": 1e6}, overheads=Overheads())
    own, received = (
        simulate(SIZES, hardware, EngineArgs(), [request(0.0, 201, 1, num_received_tokens=num)]).timings[0].ttft
        for num in (0, 200)
    )
    assert 0 < received < own / 100


def test_the_requests_of_a_workload_share_the_blocks_of_equal_hash_ids():
    workload = Workload(
        name="w", input_lens=(600, 600, 512), output_lens=(1, 2, 3), arrivals=(0.0, 0.5, 1.0), hash_ids=((5,), (5, 6), (6,))
    )
    first, second, third = requests_of(workload)
    assert first.prompt[:512] == second.prompt[:512] != third.prompt
    assert {*first.prompt[512:]}.isdisjoint({*second.prompt[512:]})
    assert second.prompt[512:] == third.prompt[:88]
    assert [len(one.prompt) for one in (first, second, third)] == [600, 600, 512]
    assert [(one.arrival_s, one.output_len) for one in (first, second, third)] == [(0.0, 1), (0.5, 2), (1.0, 3)]


def test_percentiles_of_a_histogram_are_those_of_its_times():
    rng, histogram = random.Random(0), TimeCounts()
    times = sorted(rng.expovariate(10.0) for _ in range(1000))
    for time in times:
        histogram.add(time)
    for percent in (1, 50, 99):
        assert histogram.percentile(percent) == pytest.approx(times[10 * percent - 1], rel=1e-3)
    assert TimeCounts().percentile(50) is None


@pytest.mark.parametrize(
    ("settings", "requests", "sentence"),
    [
        ({}, [request(1.0, 5, 1), request(0.0, 5, 1)], "in the order of their arrivals, got 0 s after 1 s"),
        ({}, [request(0.0, 5000, 1)], r"5000 \+ 1 tokens is too long: max_model_len is 4096"),
        ({"kv_cache_memory": 2**15}, [request(0.0, 100, 1)], r"100 \+ 1 tokens is too long: .* room for 64 tokens"),
        ({}, [request(0.0, 5, 3, max_tokens=2)], "got 5 tokens, 3 and 2"),
        ({"speculative_config": {"method": "ngram"}}, [], "speculative_config is not simulated; leave it out"),
        ({"kv_cache_memory": 100}, [], "raise tensor_parallel_size, or pick other hardware"),
        ({"dtype": "bfloat16"}, [], "dtype must be one whose rate slow host names, float32, got 'bfloat16'"),
        ({"tensor_parallel_size": 2}, [], "tensor_parallel_size must be 1, because slow host has no link to another, got 2"),
    ],
)
def test_mistakes_are_named(settings, requests, sentence):
    with pytest.raises((InvalidValueError, UnsupportedError), match=sentence):
        simulate(SIZES, SLOW_HOST, EngineArgs(**settings), requests)


def test_the_command_imports_no_torch_and_prints_figures(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}), encoding="utf-8")
    code = "import sys; from nanoinfer.cli.main import app; app(sys.argv[1:], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    given = ["simulate", "-m", str(path), "--num-prompts", "20", "--request-rate", "50", "--json"]
    found = json.loads(subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True).stdout)
    figures = found["results"][0]["figures"]
    assert (figures["num_requests"], figures["num_output_tokens"]) == (20, 20 * 128)
    assert 0 < figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"]
    assert found["settings"]["hardware"] == "H100"
