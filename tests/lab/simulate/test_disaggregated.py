"""Several engines: each request is answered once, and where engines split the work, blocks travel at the link's bandwidth."""

from dataclasses import replace

import pytest

from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer_lab.simulate.disaggregated import simulate_engines
from nanoinfer_lab.simulate.simulator import simulate
from tests.lab.simulate.test_simulator import REAL, SIZES, SLOW_HOST, random_requests, request

LINKED = replace(SLOW_HOST, link_bandwidth=512.0 * 100, link_latency_s=0.5)  # a token's keys and values have 512 bytes


def test_engines_take_the_requests_in_turns():
    requests = [request(0.0, 5, 3, first_id=i) for i in range(4)]
    timings = simulate_engines(SIZES, SLOW_HOST, EngineArgs(), requests, num_engines=2).timings
    alone = simulate(SIZES, SLOW_HOST, EngineArgs(), requests[::2]).timings
    assert [timing.token_times for timing in timings] == [one.token_times for one in alone for _ in range(2)]


def test_an_answer_of_two_engines_has_hand_checked_times():
    """Prefill 1.01 s, 100 tokens in 0.5 + 1 s, then two steps of 1.01 s."""
    result = simulate_engines(SIZES, LINKED, EngineArgs(), [request(0.0, 100, 3)], num_engines=2, num_prefill_engines=1)
    [timing] = result.timings
    assert timing.token_times == pytest.approx([1.01, 1.01 + 1.5 + 2 * 1.01])
    assert timing.num_output_tokens == 3
    assert result.inter_token_s.percentile(100) == pytest.approx(1.5 + 1.01, rel=1e-3)


def test_a_link_sends_one_prompt_after_another():
    requests = [request(0.0, 100, 2, first_id=i) for i in range(2)]
    timings = simulate_engines(SIZES, LINKED, EngineArgs(), requests, num_engines=2, num_prefill_engines=1).timings
    assert [timing.token_times[0] for timing in timings] == pytest.approx([1.02, 1.02])
    assert timings[0].token_times[1] == pytest.approx(1.02 + 1.5 + 1.01)
    assert timings[1].token_times[1] == pytest.approx(1.02 + 3.0 + 1.01)


def test_every_answer_is_complete_however_the_work_is_split():
    linked = replace(REAL, link_bandwidth=1e7)
    requests = list(random_requests(60, seed=3))
    for num_prefill in (0, 1, 2):
        result = simulate_engines(
            SIZES, linked, EngineArgs(block_size=8), requests, num_engines=3, num_prefill_engines=num_prefill
        )
        assert [timing.num_output_tokens for timing in result.timings] == [one.output_len for one in requests]
        assert [timing.arrival for timing in result.timings] == [one.arrival_s for one in requests]
        assert all(timing.arrival < timing.token_times[0] <= timing.token_times[-1] for timing in result.timings)
        num_times = sum(one.output_len - 1 for one in requests)
        assert sum(result.inter_token_s.counts.values()) == num_times


def test_a_split_that_cannot_be_is_refused():
    with pytest.raises(
        InvalidValueError, match=r"num_prefill_engines must be in 0 .. 1, so that one of 2 engines decodes, got 2"
    ):
        simulate_engines(SIZES, LINKED, EngineArgs(), [], num_engines=2, num_prefill_engines=2)
    with pytest.raises(InvalidValueError, match="because slow host has no link, got 1"):
        simulate_engines(SIZES, SLOW_HOST, EngineArgs(), [], num_engines=2, num_prefill_engines=1)
