"""Prometheus metrics, with vLLM's names under the prefix nanoinfer: instead of vllm:.

In: the deltas of each step, and the engine's counts. Out: the text of /metrics. Everything is updated once per step, in the
event loop.
"""

import time
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nanoinfer.async_llm import AsyncLLM, Updates
from nanoinfer.outputs import FinishReason, RequestOutput

# vLLM's buckets
TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
COUNT_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))


class Metrics:
    """The metrics of one AsyncLLM."""

    def __init__(self, async_llm: AsyncLLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._last_token_times: dict[tuple[str, int], float] = {}  # by request and answer
        labels = {"model_name": model_name, "engine": "0"}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"nanoinfer:{name}", text, labels, registry=self._registry).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"nanoinfer:{name}", text, labels, registry=self._registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"nanoinfer:{name}", text, labels, buckets=buckets, registry=self._registry).labels(**labels)

        scheduler, manager = async_llm.engine.scheduler, async_llm.engine.block_manager
        running = gauge("num_requests_running", "Sequences that run.")
        running.set_function(lambda: scheduler.num_running)
        waiting = gauge("num_requests_waiting", "Sequences that wait.")
        waiting.set_function(lambda: scheduler.num_unfinished - scheduler.num_running)
        usage = gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that sequences hold. 1 is all.")
        usage.set_function(lambda: 1 - manager.num_free_blocks / manager.num_blocks)
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self._preemptions = counter("num_preemptions", "Preemptions.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        finished = Counter(
            "nanoinfer:request_success", "Answers that have ended.", [*labels, "finished_reason"], registry=self._registry
        )
        self._finished_by = {one: finished.labels(**labels, finished_reason=one) for one in get_args(FinishReason)}
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Time between two steps of an answer.", TOKEN_BUCKETS)
        self._tpot = histogram("request_time_per_output_token_seconds", "Time per token after the first.", TOKEN_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the last token.", E2E_BUCKETS)
        self._num_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._num_generated = histogram("request_generation_tokens", "Generated tokens of a request.", COUNT_BUCKETS)
        async_llm.on_deliver = self.observe

    def observe(self, updates: Updates) -> None:
        """Count what one step has added to all streams."""
        now, num_tokens, last_times = time.perf_counter(), 0, self._last_token_times
        for stream, deltas in updates:
            for delta in deltas:
                num_tokens += len(delta.token_ids)
                key = delta.request_id, delta.index
                before = last_times.get(key)
                if (
                    before is None
                    and delta.index == 0
                    and stream.request is not None
                    and stream.request.metrics.ttft is not None
                ):
                    self._ttft.observe(stream.request.metrics.ttft)
                if before is not None and before < now:  # a step may have several deltas of one answer
                    self._itl.observe(now - before)
                last_times[key] = now
                if delta.finish_reason is not None:
                    del last_times[key]
            if (output := deltas[-1].output) is not None:
                self._observe_finished(output)
        self._generation_tokens.inc(num_tokens)

    def _observe_finished(self, output: RequestOutput) -> None:
        metrics, num_prompt = output.metrics, len(output.prompt_token_ids)
        for answer in output.outputs:
            self._finished_by[answer.finish_reason].inc()
        if metrics.ttft is None or metrics.finished_time is None:
            return  # it never ran
        self._e2e.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.tpot is not None:
            self._tpot.observe(metrics.tpot)
        self._prompt_tokens.inc(num_prompt)
        self._prefix_queries.inc(num_prompt)
        self._prefix_hits.inc(metrics.num_cached_tokens)
        self._preemptions.inc(metrics.num_preemptions)
        self._num_prompt.observe(num_prompt)
        self._num_generated.observe(metrics.num_output_tokens)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
