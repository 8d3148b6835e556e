"""Compute figures from the time of each token: tokens per second, TTFT, TPOT, ITL, goodput (cli/bench.py defines them)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from nanoinfer.errors import InvalidValueError
from nanoinfer_lab.bench.workloads import Workload

F = TypeVar("F", bound="Figures")

# The counters of a run: names of LLM.get_metrics() without "vllm:", and of a server's /metrics without "_total", too.
COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)


GOODPUT_NAMES = ("ttft", "tpot", "e2el")  # the names of vLLM


@dataclass(slots=True)
class RequestTiming:
    """A request, with its times in seconds of the same clock."""

    arrival: float  # when it was sent, before the connection is opened
    token_times: list[float] = field(default_factory=list)  # of each token, or of each chunk of a stream
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # as counted by the engine or the server
    finish_reason: str | None = None
    error: str | None = None  # why the request failed. None: it succeeded

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def e2el(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def tpot(self) -> float:
        """The time per output token in seconds. 0 with a single token, as in vLLM."""
        return (self.token_times[-1] - self.token_times[0]) / max(self.num_output_tokens - 1, 1)

    def row(self, start: float) -> dict[str, object]:
        """Return what a report has of a request. start: the time of the run's first arrival.

        >>> RequestTiming(3.0, [3.5, 3.75], 4, 2, "length").row(2.5)["itl_ms"]
        [250.0]
        """
        has_times = self.error is None
        return {
            "arrival_s": round(self.arrival - start, 6),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "ttft_ms": round(self.ttft * 1e3, 3) if has_times else None,
            "tpot_ms": round(self.tpot * 1e3, 3) if has_times and self.num_output_tokens > 1 else None,
            "itl_ms": [round((after - before) * 1e3, 3) for before, after in pairwise(self.token_times)] if has_times else [],
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run. A latency is None if no request has it: the TPOT and the ITL need a second token.

    goodput_requests_per_s: the requests per second that keep all limits. None: no limits were given.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2el_ms: Percentiles | None
    goodput_requests_per_s: float | None


@dataclass(frozen=True, slots=True)
class Run(Generic[F]):
    """A measured run."""

    figures: F  # what was measured of all requests
    counts: dict[str, int]  # how much each of COUNTERS grew, as far as the engine or the server has it
    requests: list[dict[str, object]]  # RequestTiming.row of each request

    @classmethod
    def of(cls, figures: F, timings: list[RequestTiming], before: Mapping[str, int], after: Mapping[str, int]) -> "Run[F]":
        """Make the rows and the counts. before, after: the counters before and after the run."""
        start = min(timing.arrival for timing in timings)
        counts = {name: after[name] - before.get(name, 0) for name in COUNTERS if name in after}
        return cls(figures, counts, [timing.row(start) for timing in timings])


@dataclass(frozen=True, slots=True)
class Measurement(Generic[F]):
    """The runs of a workload, in their order. figures: those of the run with the median output tokens per second."""

    workload: Workload
    figures: F
    runs: list[Run[F]]

    @classmethod
    def of(cls, workload: Workload, runs: list[Run[F]]) -> "Measurement[F]":
        by_speed = sorted((run.figures for run in runs), key=lambda found: found.output_tokens_per_s)
        return cls(workload, by_speed[len(runs) // 2], runs)


def figures(timings: list[RequestTiming], goodput: Mapping[str, float] = {}) -> Figures:
    """Compute the figures of a run. Failed requests count in num_requests and begin the run, and in nothing else.

    goodput: name of GOODPUT_NAMES -> milliseconds that a good request must not exceed. {}: goodput is not computed.

    >>> found = figures([RequestTiming(0.0, [0.5, 0.6, 0.8], num_prompt_tokens=5, num_output_tokens=3)], {"ttft": 600.0})
    >>> found.ttft_ms.p50, found.itl_ms.p50, found.tpot_ms.p50, found.output_tokens_per_s, found.goodput_requests_per_s
    (500.0, 150.0, 150.0, 3.75, 1.25)
    """
    good = [timing for timing in timings if timing.error is None]
    start = min(timing.arrival for timing in timings)
    duration = max((timing.token_times[-1] for timing in good), default=start) - start
    per_second = 1 / duration if duration else 0.0
    num_prompt_tokens = sum(timing.num_prompt_tokens for timing in good)
    num_output_tokens = sum(timing.num_output_tokens for timing in good)
    num_within = sum(all(getattr(timing, name) * 1e3 <= limit for name, limit in goodput.items()) for timing in good)
    return Figures(
        num_requests=len(timings),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        duration_s=duration,
        output_tokens_per_s=num_output_tokens * per_second,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) * per_second,
        requests_per_s=len(good) * per_second,
        ttft_ms=percentiles([timing.ttft for timing in good]),
        tpot_ms=percentiles([timing.tpot for timing in good if timing.num_output_tokens > 1]),
        itl_ms=percentiles([after - before for timing in good for before, after in pairwise(timing.token_times)]),
        e2el_ms=percentiles([timing.e2el for timing in good]),
        goodput_requests_per_s=num_within * per_second if goodput else None,
    )


def parse_goodput(texts: list[str]) -> dict[str, float]:
    """Parse vLLM's format, in which a text may have several limits.

    >>> parse_goodput(["ttft:200 tpot:50", "e2el:1000"])
    {'ttft': 200.0, 'tpot': 50.0, 'e2el': 1000.0}
    """
    limits = {}
    for item in " ".join(texts).split():
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in GOODPUT_NAMES or not limits[name] > 0:
            known = ", ".join(GOODPUT_NAMES)
            raise InvalidValueError(f"goodput must be such as ttft:200, with milliseconds > 0 and one of {known}, got {item!r}")
    return limits


def percentiles(times: list[float]) -> Percentiles | None:
    """Return percentiles of times in seconds. None: there are no times."""
    if not times:
        return None
    import numpy as np  # not at the top, because there is no numpy where the site's pages simulate

    seconds = np.array(times)
    values = [seconds.mean(), *np.percentile(seconds, (50, 95, 99))]
    return Percentiles(*(round(float(value) * 1e3, 3) for value in values))
