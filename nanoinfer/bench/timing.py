"""From the time of each token to the figures: tokens per second, TTFT, TPOT, ITL (cli/bench.py defines them)."""

from dataclasses import dataclass, field
from itertools import chain

import numpy as np


@dataclass(slots=True)
class RequestTiming:
    """The times of one request, in seconds of one clock."""

    arrival: float
    token_times: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. A latency is None where no request has one: the TPOT and the ITL need a second token."""

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


def figures(timings: list[RequestTiming], num_prompt_tokens: int) -> Figures:
    """Compute the figures of a run in which every request has at least one token.

    >>> found = figures([RequestTiming(0.0, [0.5, 0.6, 0.8])], num_prompt_tokens=5)
    >>> found.ttft_ms.p50, found.itl_ms.p50, found.tpot_ms.p50, found.output_tokens_per_s
    (500.0, 150.0, 150.0, 3.75)
    """
    num_output_tokens = sum(len(timing.token_times) for timing in timings)
    duration = max(timing.token_times[-1] for timing in timings) - min(timing.arrival for timing in timings)
    gaps = [np.diff(timing.token_times) for timing in timings if len(timing.token_times) > 1]
    return Figures(
        num_requests=len(timings),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        duration_s=duration,
        output_tokens_per_s=num_output_tokens / duration,
        total_tokens_per_s=(num_output_tokens + num_prompt_tokens) / duration,
        requests_per_s=len(timings) / duration,
        ttft_ms=percentiles([timing.token_times[0] - timing.arrival for timing in timings]),
        tpot_ms=percentiles([gap.mean() for gap in gaps]),
        itl_ms=percentiles(list(chain.from_iterable(gaps))),
    )


def percentiles(times: list[float]) -> Percentiles | None:
    """times: in seconds. None if there are none."""
    if not times:
        return None
    seconds = np.array(times)
    values = [seconds.mean(), *np.percentile(seconds, (50, 95, 99))]
    return Percentiles(*(round(float(value) * 1e3, 3) for value in values))
