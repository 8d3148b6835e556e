"""/metrics counts what was served, under vLLM's names."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanoinfer import AsyncLLM
from nanoinfer.outputs import Counter, Gauge
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps


def read(server):
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_requests_are_counted(server):
    server.wait_until_idle()
    before = read(server)
    prompt = [400 + i for i in range(100)]
    for _ in range(2):
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 5, "n": 2, "ignore_eos": True})
    after = read(server)

    def grown(name, reason=None):
        return after["nanoinfer:" + name, reason] - before["nanoinfer:" + name, reason]

    assert grown("prompt_tokens_total") == grown("prefix_cache_queries_total") == 200
    assert 0 < grown("prefix_cache_hits_total") < 100
    assert grown("generation_tokens_total") == 20
    for metric in server.async_llm.engine.get_metrics():  # the numbers of LLM.get_metrics
        name, reason = metric.name.removeprefix("vllm:"), metric.labels.get("finished_reason")
        if isinstance(metric, Counter | Gauge):
            assert after[f"nanoinfer:{name}{'_total' * isinstance(metric, Counter)}", reason] == metric.value
        else:
            assert after[f"nanoinfer:{name}_count", None] == metric.count
            assert after[f"nanoinfer:{name}_sum", None] == pytest.approx(metric.sum)
    assert (grown("request_success_total", "length"), grown("request_success_total", "error")) == (4, 0)
    times = ("time_to_first_token", "e2e_request_latency", *(f"request_{part}_time" for part in ("queue", "prefill", "decode")))
    for name in times:
        assert grown(f"{name}_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 16, "4 after the first token of each of 4 answers"
    parts = sum(grown(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(grown("e2e_request_latency_seconds_sum"))
    assert (grown("request_max_num_generation_tokens_sum"), grown("request_generation_tokens_sum")) == (10, 20)
    assert [after[f"nanoinfer:num_requests_{state}", None] for state in ("running", "waiting")] == [0, 0]


@pytest.mark.slow
def test_gauges_show_what_runs_and_waits_and_speculation_is_counted():
    more = {"speculative_config": {"method": "ngram", "adaptive": False}, "max_num_seqs": 2, "seed": 0}
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", **more), metrics_prefix="vllm:") as server:
        with limited_steps(server.async_llm.engine, 5) as steps:
            connections = [server.open_stream(body) for _ in range(5)]
            while server.num_unfinished() < 5 or steps.num_made < 5:
                time.sleep(0.005)
            seen = read(server)
            for connection in connections:
                connection.close()
            server.wait_until_idle()
        server.post("/v1/completions", {"prompt": [405, 406, 407] * 9, "max_tokens": 60, "temperature": 0, "ignore_eos": True})
        text, counted = server.get("/metrics").text, read(server)
    assert (seen["vllm:num_requests_running", None], seen["vllm:num_requests_waiting", None]) == (2, 3)
    assert 0 < seen["vllm:kv_cache_usage_perc", None] < 1
    assert all(name.startswith("vllm:") for name, _ in seen)
    assert counted["vllm:spec_decode_num_drafts_total", None] > 0
    assert 'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny-qwen3",position="0"}' in text
