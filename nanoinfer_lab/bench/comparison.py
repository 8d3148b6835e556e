"""Compare two reports of `nanoinfer bench`, with intervals over their runs, as Kalibera and Jones (2013) recommend.

In: the JSON of `throughput`, `latency` or `serve`, twice, of the same workloads. Out: a Comparison of each figure.

An interval is Welch's t interval (Welch 1947, "The generalization of 'Student's' problem when several different population
variances are involved") of the mean logarithm of the runs, so it belongs to their geometric mean, or to the ratio of two.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.errors import InvalidValueError

# The 97.5th percentile of Student's t with 1, 2, ... degrees of freedom. More degrees count as the last.
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# what a row of the comparison shows -> where a run's figures have it
FIGURES = {"output tok/s": ("output_tokens_per_s", None)} | {
    f"{name.upper()} {percentile}, ms": (f"{name}_ms", percentile)
    for name in ("ttft", "tpot", "itl", "e2el")
    for percentile in ("p50", "p99")
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A geometric mean, or a ratio of two, with the ends of its 95% interval. None: a single run has no interval."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of a workload in two reports. ratio: the second by the first."""

    workload: str
    figure: str
    first: Estimate
    second: Estimate
    ratio: Estimate

    @property
    def verdict(self) -> str:
        """What the interval says about the second report."""
        if self.ratio.low is None or self.ratio.high is None:
            return "a single run"
        return "higher" if self.ratio.low > 1 else "lower" if self.ratio.high < 1 else "no difference shown"


def read_report(path: Path) -> dict[str, Any]:
    """Read a report. Raises: InvalidValueError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"the report {path} cannot be read ({error})") from error
    if not isinstance(report, dict) or not {"machine", "versions", "settings", "results"} <= report.keys():
        raise InvalidValueError(
            f"{path} is not a report; `nanoinfer bench throughput`, `latency` and `serve` --json write reports"
        )
    return report


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[Comparison]:
    """Compare every figure that all runs of both reports have. Raises: InvalidValueError for different workloads."""
    by_name = [{result["workload"]["name"]: result for result in report["results"]} for report in (first, second)]
    if by_name[0].keys() != by_name[1].keys():
        names = " and ".join(", ".join(results) for results in by_name)
        raise InvalidValueError(f"the reports have different workloads, {names}; measure the same ones in both")
    found = []
    for workload, one in by_name[0].items():
        other = by_name[1][workload]
        if different := [name for name, value in one["workload"].items() if value != other["workload"].get(name)]:
            raise InvalidValueError(
                f"workload {workload} is not the same in both reports, its {', '.join(different)} differ; measure the same one"
            )
        for figure, path in FIGURES.items():
            before, after = ([_value(run["figures"], *path) for run in result["runs"]] for result in (one, other))
            if all(before) and all(after):
                ratio = geometric_mean(after, before)
                found.append(Comparison(workload, figure, geometric_mean(before), geometric_mean(after), ratio))
    if not found:
        raise InvalidValueError("no figure is above 0 in all runs of both reports; see the errors of their requests")
    return found


def _value(figures: dict[str, Any], name: str, percentile: str | None) -> float:
    """Return a figure of a run. 0: the run does not have it."""
    value = figures.get(name)
    return (value[percentile] if percentile and value else value) or 0.0


def geometric_mean(values: Sequence[float], divisor: Sequence[float] = ()) -> Estimate:
    """Return the geometric mean of values above 0, by that of the divisor if there is one.

    >>> estimate = geometric_mean([1.0, math.e, math.e**2])
    >>> round(estimate.mean, 3), round(estimate.low, 3), round(estimate.high, 3)
    (2.718, 0.227, 32.601)
    """
    samples = [np.log(sample) for sample in (values, divisor) if len(sample)]
    mean = samples[0].mean() - sum(sample.mean() for sample in samples[1:])
    if min(map(len, samples)) < 2:
        return Estimate(math.exp(mean), None, None)
    errors = [sample.var(ddof=1) / len(sample) for sample in samples]  # squared standard errors
    by_degrees = sum(error**2 / (len(sample) - 1) for error, sample in zip(errors, samples, strict=True))
    degrees = int(sum(errors) ** 2 / by_degrees + 1e-9) if by_degrees else len(STUDENT_T)  # rounded down
    half = STUDENT_T[min(degrees, len(STUDENT_T)) - 1] * math.sqrt(sum(errors))
    return Estimate(*(math.exp(end) for end in (mean, mean - half, mean + half)))


def differences(first: dict[str, Any], second: dict[str, Any], part: str) -> list[str]:
    """Return a phrase for each value of a part, such as "machine", that is not the same in both reports."""
    one, other = first[part], second[part]
    return [f"{name} {one.get(name)} and {other.get(name)}" for name in one | other if one.get(name) != other.get(name)]


def num_failed(report: dict[str, Any]) -> int:
    return sum(
        request["error"] is not None for result in report["results"] for run in result["runs"] for request in run["requests"]
    )
