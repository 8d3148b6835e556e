"""Counts of an engine for monitoring, under vLLM's names.

In: the requests, the scheduler, the block manager, the speculator. Out: Metrics.
"""

from collections import Counter as Totals
from collections.abc import Iterable
from dataclasses import dataclass

from nanoinfer.engine.request import Request
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.speculative.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that LLM.get_metrics() returns, under the name that vLLM gives it."""

    name: str
    value: float


class Counter(Metric):
    """A metric that only grows."""

    __slots__ = ()


class Gauge(Metric):
    """A metric that goes up and down."""

    __slots__ = ()


class EngineMetrics:
    """The totals of an engine's requests."""

    def __init__(self) -> None:
        self._ended: Totals[str] = Totals()  # of the requests that have ended

    def add_ended(self, request: Request) -> None:
        """Count a request that is about to be removed from the engine."""
        self._ended.update(_totals_of(request))

    def read(self, running: Iterable[Request], scheduler: Scheduler, speculator: Speculator | None) -> list[Metric]:
        """The metrics of this moment. running: the requests that have not ended."""
        totals, manager = self._ended.copy(), scheduler.block_manager
        for request in running:
            totals.update(_totals_of(request))
        if speculator is not None:
            counts = speculator.metrics
            totals["spec_decode_num_drafts"] = counts.num_drafts
            totals["spec_decode_num_draft_tokens"] = counts.num_draft_tokens
            totals["spec_decode_num_accepted_tokens"] = counts.num_accepted_tokens
        return [
            Gauge("vllm:num_requests_running", scheduler.num_running),
            Gauge("vllm:num_requests_waiting", scheduler.num_unfinished - scheduler.num_running),
            Gauge("vllm:kv_cache_usage_perc", 1 - manager.num_free_blocks / manager.num_blocks),
            *(Counter(f"vllm:{name}", value) for name, value in (_NO_TOTALS | totals).items()),
        ]


_NO_TOTALS = dict.fromkeys(
    ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"), 0
)


def _totals_of(request: Request) -> dict[str, int]:
    """What a request has added to the counters. A prompt counts from its first token on."""
    first = request.sequences[0]
    num_prompt = len(first.prompt_token_ids) if request.metrics.first_token_time is not None else 0
    return {
        "prompt_tokens": num_prompt,
        "generation_tokens": sum(seq.num_output_tokens for seq in request.sequences),
        "prefix_cache_queries": num_prompt if first.params.prompt_logprobs is None else 0,  # these need every row of the prompt
        "prefix_cache_hits": first.num_cached_tokens,
        "num_preemptions": sum(seq.num_preemptions for seq in request.sequences),
    }
