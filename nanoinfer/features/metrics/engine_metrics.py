"""Counts of an engine for monitoring, under vLLM's names."""

import time
from bisect import bisect_left
from collections import Counter as Totals
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from nanoinfer.engine.observer import Observer
from nanoinfer.engine.request import Request
from nanoinfer.execution.executor import StepOutput
from nanoinfer.outputs import Counter, FinishReason, Gauge, Histogram, Metric, Vector  # noqa: F401 (engine.metrics had it)
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from nanoinfer.engine.llm_engine import LLMEngine

_OF_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_OF_REQUESTS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
                1920.0, 7680.0)  # fmt: skip
_OF_COUNTS = tuple(factor * 10.0**power for power in range(6) for factor in (1, 2, 5))
BOUNDS = {  # upper bounds of the histograms' buckets, in seconds or tokens, as in vLLM
    "inter_token_latency_seconds": _OF_TOKENS,
    "time_to_first_token_seconds": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                                    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    "e2e_request_latency_seconds": _OF_REQUESTS,
    "request_queue_time_seconds": _OF_REQUESTS,
    "request_prefill_time_seconds": _OF_REQUESTS,
    "request_decode_time_seconds": _OF_REQUESTS,
    "request_time_per_output_token_seconds": _OF_TOKENS,
    "request_prompt_tokens": _OF_COUNTS,
    "request_generation_tokens": _OF_COUNTS,
    "request_max_num_generation_tokens": _OF_COUNTS,
}  # fmt: skip


class EngineMetrics(Observer):
    """The totals of an engine's requests, and how long they took. Writes what the scheduler does into their RequestMetrics."""

    def __init__(self) -> None:
        self._running: dict[str, Request] = {}  # by id
        self._finished: Totals[str] = Totals()  # what finished requests have added
        self._reasons: Totals[str] = Totals()  # why answers have ended
        self._histograms = {name: _Buckets(bounds) for name, bounds in BOUNDS.items()}
        self._last_times: dict[Sequence, float] = {}  # when a sequence got its newest tokens

    def step_collected(self, plan: StepPlan, output: StepOutput) -> None:
        """Count the times since the last tokens of sequences that get tokens now. With accepted drafts they are several."""
        now, done = time.perf_counter(), SequenceStatus.FINISHED
        sequences = [out.sequence for out in output.sequences if out.token_ids and out.sequence.status is not done]
        times = [*map(self._last_times.get, sequences)]
        for before in {*times}:  # most have one time, that of the last step
            if before is not None:
                self._histograms["inter_token_latency_seconds"].add(now - before, times.count(before))
        self._last_times.update(dict.fromkeys(sequences, now))

    def request_added(self, request: Request) -> None:
        self._running[request.request_id] = request

    def sequence_started(self, seq: Sequence, num_cached_tokens: int) -> None:
        times = self._running[seq.request_id].metrics
        if times.first_scheduled_time is None:
            times.first_scheduled_time, times.num_cached_tokens = time.perf_counter(), num_cached_tokens

    def sequence_preempted(self, seq: Sequence) -> None:
        self._running[seq.request_id].metrics.num_preemptions += 1

    def request_finished(self, request: Request) -> None:
        """Count a request, unless it was never queued. Prompts that are only read count in the totals."""
        self._running.pop(request.request_id, None)
        if request.sequences[0].status is not SequenceStatus.FINISHED:
            return
        self._finished.update(_totals_of(request))
        for seq in request.sequences:
            self._last_times.pop(seq, None)
        output, first = request.output, request.sequences[0]
        if output is None or not first.is_answered:
            return
        self._reasons.update(str(answer.finish_reason) for answer in output.outputs)
        times = request.metrics
        values: dict[str, float | None] = {"e2e_request_latency_seconds": _between(times.arrival_time, times.finished_time)}
        if times.first_token_time is not None:
            values |= {
                "time_to_first_token_seconds": times.ttft,
                "request_queue_time_seconds": _between(times.arrival_time, times.first_scheduled_time),
                "request_prefill_time_seconds": _between(times.first_scheduled_time, times.first_token_time),
                "request_decode_time_seconds": _between(times.first_token_time, times.finished_time),
                "request_time_per_output_token_seconds": times.tpot,
                "request_prompt_tokens": len(first.prompt_token_ids),
                "request_generation_tokens": request.num_output_tokens,
                "request_max_num_generation_tokens": max(seq.num_output_tokens for seq in request.sequences),
            }
        for name, value in values.items():
            if value is not None:
                self._histograms[name].add(value)

    def metrics_read(self, engine: "LLMEngine", metrics: list[Metric]) -> None:
        """Add the current metrics."""
        totals, manager = self._finished.copy(), engine.block_manager
        for request in self._running.values():
            totals.update(_totals_of(request))
        metrics += [
            Gauge("vllm:num_requests_running", len(engine.scheduler.running)),
            Gauge("vllm:num_requests_waiting", len(engine.scheduler.waiting)),
            Gauge("vllm:kv_cache_usage_perc", 1 - manager.num_free_blocks / manager.num_blocks),
            *(Counter(f"vllm:{name}", totals[name]) for name in _TOTALS),
            *(
                Counter("vllm:request_success", self._reasons[reason], labels={"finished_reason": reason})
                for reason in get_args(FinishReason)
            ),
            *(buckets.histogram(f"vllm:{name}") for name, buckets in self._histograms.items()),
            *(Counter(f"vllm:{name}", count) for name, count in manager.counts.items()),
        ]


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


class _Buckets:
    """Counts values in buckets, by their upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, float("inf"))
        self._sum = 0.0
        self._counts = [0] * len(self._bounds)

    def add(self, value: float, num: int = 1) -> None:
        self._sum += value * num
        self._counts[bisect_left(self._bounds, value)] += num

    def histogram(self, name: str) -> Histogram:
        buckets = dict(zip(map(str, self._bounds), accumulate(self._counts), strict=True))
        return Histogram(name, sum(self._counts), self._sum, buckets)


_TOTALS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions")


def _totals_of(request: Request) -> dict[str, int]:
    """Return what a request adds to the counters. A prompt counts from its first generated token on."""
    first = request.sequences[0]
    num_prompt = len(first.prompt_token_ids) if request.metrics.first_token_time is not None else 0
    num_queried = num_prompt if first.reader is None else 0  # a reader needs all rows of the prompt
    counted = request.metrics.num_cached_tokens, request.metrics.num_preemptions
    counts = (num_prompt, request.num_output_tokens, num_queried, *counted)
    return dict(zip(_TOTALS, counts, strict=True))
