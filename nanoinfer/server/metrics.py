"""Prometheus metrics, with vLLM's names under the prefix nanoinfer: instead of vllm:.

In: the engine's metrics (LLM.get_metrics), and the deltas of each step for others. Out: the text of /metrics.
"""

import time
from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.engine import metrics as engine_metrics
from nanoinfer.outputs import Delta, FinishReason, RequestOutput

# vLLM's buckets
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
COUNT_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))


class Metrics(Collector):
    """The metrics of an AsyncLLM: those of its engine, and those of the server."""

    def __init__(self, async_llm: AsyncLLM, model_name: str) -> None:
        self._async_llm = async_llm
        self._registry = CollectorRegistry()
        self._last_token_times: dict[tuple[str, int], float] = {}  # (request id, answer's index) -> its last token's time
        self._of_engine: list[engine_metrics.Metric] = []  # read by text()
        self._labels = labels = {"model_name": model_name, "engine": "0"}
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"nanoinfer:{name}", text, labels, buckets=buckets, registry=self._registry).labels(**labels)

        finished = Counter(
            "nanoinfer:request_success", "Answers that have ended.", [*labels, "finished_reason"], registry=self._registry
        )
        self._finished_by = {reason: finished.labels(**labels, finished_reason=reason) for reason in get_args(FinishReason)}
        self._itl = histogram("inter_token_latency_seconds", "Time between two steps of an answer.", TOKEN_BUCKETS)
        self._tpot = histogram("request_time_per_output_token_seconds", "Time per token after the first.", TOKEN_BUCKETS)
        self._num_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._num_generated = histogram("request_generation_tokens", "Generated tokens of a request.", COUNT_BUCKETS)
        async_llm.on_deliver = self.observe

    def observe(self, news: list[list[Delta]]) -> None:
        """Count the deltas that a step has added to all streams."""
        now, last_times = time.perf_counter(), self._last_token_times
        for deltas in news:
            for delta in deltas:
                key = delta.request_id, delta.index
                before = last_times.get(key)
                if before is not None and before < now:  # several deltas of a step have the same time
                    self._itl.observe(now - before)
                last_times[key] = now
                if delta.finish_reason is not None:
                    del last_times[key]
            if (output := deltas[-1].output) is not None:
                self._observe_finished(output)

    def _observe_finished(self, output: RequestOutput) -> None:
        metrics = output.metrics
        for answer in output.outputs:
            self._finished_by[answer.finish_reason].inc()
        if metrics.ttft is None or metrics.finished_time is None:
            return  # the request never ran
        if metrics.tpot is not None:
            self._tpot.observe(metrics.tpot)
        self._num_prompt.observe(len(output.prompt_token_ids))
        self._num_generated.observe(metrics.num_output_tokens)

    async def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._of_engine = await self._async_llm.get_metrics()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the engine's metrics, for the registry."""
        for metric in self._of_engine:
            kind, samples = "counter", list[tuple[str, dict[str, str], float]]()
            match metric:
                case engine_metrics.Histogram():
                    kind = "histogram"
                    samples += [("_bucket", {"le": floatToGoString(bound)}, num) for bound, num in metric.buckets.items()]
                    samples += [("_count", {}, metric.count), ("_sum", {}, metric.sum)]
                case engine_metrics.Vector():
                    samples += [("_total", {"position": str(i)}, value) for i, value in enumerate(metric.values)]
                case engine_metrics.Counter():
                    samples.append(("_total", {}, metric.value))
                case engine_metrics.Gauge():
                    kind = "gauge"
                    samples.append(("", {}, metric.value))
            name = f"nanoinfer:{metric.name.removeprefix('vllm:')}"
            family = MetricFamily(name, f"As {metric.name} in vLLM.", kind)
            for suffix, labels, value in samples:
                family.add_sample(name + suffix, self._labels | labels, value)
            yield family
