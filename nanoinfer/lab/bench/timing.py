"""Compute figures from the time of each token: tokens per second, TTFT, TPOT, ITL (cli/bench.py defines them)."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(slots=True)
class RequestTiming:
    """A request, with its times in seconds of the same clock."""

    arrival: float  # when it was sent, before the connection is opened
    token_times: list[float] = field(default_factory=list)  # of each token, or of each chunk of a stream
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # as counted by the engine or the server
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


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run. A latency is None if no request has it: the TPOT and the ITL need a second token."""

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


def figures(timings: list[RequestTiming]) -> Figures:
    """Compute the figures of a run. Failed requests count in num_requests and begin the run, and in nothing else.

    >>> found = figures([RequestTiming(0.0, [0.5, 0.6, 0.8], num_prompt_tokens=5, num_output_tokens=3)])
    >>> found.ttft_ms.p50, found.itl_ms.p50, found.tpot_ms.p50, found.output_tokens_per_s
    (500.0, 150.0, 150.0, 3.75)
    """
    good = [timing for timing in timings if timing.error is None]
    start = min(timing.arrival for timing in timings)
    duration = max((timing.token_times[-1] for timing in good), default=start) - start
    per_second = 1 / duration if duration else 0.0
    num_prompt_tokens = sum(timing.num_prompt_tokens for timing in good)
    num_output_tokens = sum(timing.num_output_tokens for timing in good)
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
    )


def percentiles(times: list[float]) -> Percentiles | None:
    """Return percentiles of times in seconds. None: there are no times."""
    if not times:
        return None
    seconds = np.array(times)
    values = [seconds.mean(), *np.percentile(seconds, (50, 95, 99))]
    return Percentiles(*(round(float(value) * 1e3, 3) for value in values))
