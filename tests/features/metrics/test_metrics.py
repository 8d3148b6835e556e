"""The counts of an engine, with an executor that has no model: each is counted by hand."""

import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.executor import PromptReader
from nanoinfer.features.logprobs import reading
from nanoinfer.features.metrics.engine_metrics import BOUNDS, EngineMetrics
from tests.helpers.fake_executor import FakeExecutor


def params(max_tokens):
    return SamplingParams(max_tokens=max_tokens, detokenize=False)


def engine_with_metrics():
    return LLMEngine(FakeExecutor(), EngineConfig(), observer=EngineMetrics())


def read(engine):
    return {one.name.removeprefix("vllm:"): one for one in engine.get_metrics()}


def test_a_request_counts_while_it_runs_and_once_when_it_has_finished():
    engine = engine_with_metrics()
    request = engine.add_request([1, 2, 3, 4, 5], params(3))
    found = read(engine)
    assert (found["num_requests_waiting"].value, found["prompt_tokens"].value) == (1, 0)  # it has no token yet
    engine.step()
    found = read(engine)
    assert (found["num_requests_running"].value, found["prompt_tokens"].value, found["generation_tokens"].value) == (1, 5, 1)
    assert found["kv_cache_usage_perc"].value == pytest.approx(2 / 16)
    finish(engine, request)
    found = read(engine)
    assert (found["num_requests_running"].value, found["prompt_tokens"].value, found["generation_tokens"].value) == (0, 5, 3)
    assert found["e2e_request_latency_seconds"].count == 1
    engine.abort(engine.add_request([6], params(3)).request_id)
    found = read(engine)
    assert (found["num_requests_waiting"].value, found["prompt_tokens"].value) == (0, 5)


def finish(engine, request):
    while request.output is None:
        engine.step()
    return request


def test_a_second_prompt_with_the_same_beginning_hits_the_cache():
    engine = engine_with_metrics()
    for _ in range(2):
        finish(engine, engine.add_request(list(range(9)), params(1)))
    found = read(engine)
    assert (found["prefix_cache_queries"].value, found["prefix_cache_hits"].value) == (18, 8)
    assert not [name for name in found if name.startswith(("spec_decode", "external"))]  # neither drafts nor a store


def test_a_prompt_that_is_only_read_counts_as_a_prompt_and_one_that_is_too_long_as_nothing():
    engine = engine_with_metrics()
    request = engine.add_request([1] * 10_000, params(1))
    assert request.output.outputs[0].finish_reason == "error"
    assert {name for name, one in read(engine).items() if getattr(one, "value", 0)} == set()
    finish(engine, engine.submit(reading.prepare(engine.inputs, list(range(9)), PromptReader(), engine.max_model_len)))
    found = read(engine)
    assert {name for name, one in found.items() if getattr(one, "value", 0)} == {"prompt_tokens"}
    assert found["e2e_request_latency_seconds"].count == 0


def test_a_bucket_counts_what_took_at_most_its_bound():
    engine, metrics = LLMEngine(FakeExecutor(), EngineConfig()), EngineMetrics()
    for seconds in (0.005, 0.006, 99.0):
        request = finish(engine, engine.add_request([1], params(1)))
        request.metrics.first_token_time = request.metrics.arrival_time + seconds
        metrics.request_finished(request)
    engine.observer = metrics
    histogram = read(engine)["time_to_first_token_seconds"]
    assert histogram.sum == pytest.approx(99.011)
    assert len(histogram.buckets) == len(BOUNDS["time_to_first_token_seconds"]) + 1
    assert [histogram.buckets[bound] for bound in ("0.001", "0.01", "80.0", "160.0", "inf")] == [0, 2, 2, 3, 3]
