"""Prometheus metrics, with vLLM's names under the prefix nanoinfer: or another.

In: the engine's metrics (LLM.get_metrics). Out: the text of /metrics.
"""

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanoinfer import outputs
from nanoinfer.server.async_llm import AsyncLLM


class Metrics(Collector):
    """The metrics of an AsyncLLM's engine. prefix: of their names, in place of vLLM's."""

    def __init__(self, async_llm: AsyncLLM, model_name: str, prefix: str) -> None:
        self._async_llm, self._prefix = async_llm, prefix
        self._of_engine: list[outputs.Metric] = []  # read by text()
        self._labels = {"model_name": model_name, "engine": "0"}

    async def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._of_engine = await self._async_llm.get_metrics()
        return generate_latest(self)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the engine's metrics, for generate_latest."""
        families: dict[str, MetricFamily] = {}
        for metric in self._of_engine:
            kind, samples = "counter", list[tuple[str, dict[str, str], float]]()
            match metric:
                case outputs.Histogram():
                    kind = "histogram"
                    samples += [("_bucket", {"le": floatToGoString(bound)}, num) for bound, num in metric.buckets.items()]
                    samples += [("_count", {}, metric.count), ("_sum", {}, metric.sum)]
                case outputs.Vector():
                    samples += [("_total", {"position": str(i)}, value) for i, value in enumerate(metric.values)]
                case outputs.Counter():
                    samples.append(("_total", {}, metric.value))
                case outputs.Gauge():
                    kind = "gauge"
                    samples.append(("", {}, metric.value))
            name = self._prefix + metric.name.removeprefix("vllm:")
            family = families.setdefault(name, MetricFamily(name, f"As {metric.name} in vLLM.", kind))
            for suffix, labels, value in samples:
                family.add_sample(name + suffix, self._labels | metric.labels | labels, value)
        yield from families.values()
