"""Fit a Hardware to runs of a real server, so that the simulation of the runs gives the measured times.

In: reports of `nanoinfer bench serve --json`. Out: a Hardware. At least one run should have few requests at a time, and another
many, because their times tell the memory's bandwidth from the rate of products and from the overheads.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer.lab.bench.workloads import Workload
from nanoinfer.lab.simulate.costs import ModelSizes
from nanoinfer.lab.simulate.hardware import Hardware, Overheads
from nanoinfer.lab.simulate.simulator import requests_of, simulate

STEP, LEAST_STEP = 0.4, 0.01  # of the search, in logarithms: factors of 1.5 and of 1.01


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a server: its workload, and the seconds of each request. tpot_s: None for an answer of one token."""

    workload: Workload
    ttft_s: list[float]
    tpot_s: list[float | None]


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read a report of `nanoinfer bench serve --json`. Raises: InvalidValueError: the file has another form."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        return [
            MeasuredRun(
                Workload(**{name: tuple(value) if isinstance(value, list) else value for name, value in found["workload"].items()}),
                [row["ttft_ms"] / 1e3 for row in run["requests"]],
                [None if row["tpot_ms"] is None else row["tpot_ms"] / 1e3 for row in run["requests"]],
            )
            for found in results
            for run in found["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"{path} must be what `nanoinfer bench serve --json` printed, with no failed request ({error})"
        ) from error


def calibrate(sizes: ModelSizes, hardware: Hardware, settings: EngineArgs, runs: Iterable[MeasuredRun]) -> Hardware:
    """Return the hardware with the bandwidth, the rate and the overheads for which the simulated times are nearest.

    The distance is the mean square of the logarithm of simulated / measured TTFT and TPOT, over the requests of all runs.

    Args:
        hardware: where the search begins.
        settings: the arguments of the server's LLM.
    """
    measured = list(runs)

    def loss(logarithms: list[float]) -> float:
        machine = _with(hardware, logarithms)
        return sum(_distance(run, sizes, machine, settings) for run in measured) / len(measured)

    start = (1.0, 1.0, 0.5, *(max(value, 1e-4) for value in astuple(hardware.overheads)))
    return _with(hardware, _least([math.log(value) for value in start], loss))


def _with(hardware: Hardware, logarithms: list[float]) -> Hardware:
    """Return a hardware with other limits: factors of the bandwidth and the rates, 1 - overlap, then the overheads."""
    of_bandwidth, of_rates, alone, *overheads = map(math.exp, logarithms)
    return replace(
        hardware,
        bandwidth=hardware.bandwidth * of_bandwidth,
        rates={dtype: rate * of_rates for dtype, rate in hardware.rates.items()},
        overlap=1 - min(alone, 1.0),
        overheads=Overheads(*overheads),
    )


def _distance(run: MeasuredRun, sizes: ModelSizes, hardware: Hardware, settings: EngineArgs) -> float:
    timings = simulate(sizes, hardware, settings, requests_of(run.workload)).timings
    pairs = [(timing.ttft, ttft) for timing, ttft in zip(timings, run.ttft_s, strict=True)]
    pairs += [(timing.tpot, tpot) for timing, tpot in zip(timings, run.tpot_s, strict=True) if tpot]
    return sum(math.log(simulated / measured) ** 2 for simulated, measured in pairs) / len(pairs)


def _least(point: list[float], loss: Callable[[list[float]], float]) -> list[float]:
    """Find a minimum by moving along one axis at a time, with smaller steps when no step helps (Hooke and Jeeves 1961)."""
    best, step = loss(point), STEP
    while step > LEAST_STEP:
        has_moved = False
        for axis in range(len(point)):
            for change in (step, -step):
                moved = [*point[:axis], point[axis] + change, *point[axis + 1 :]]
                if (found := loss(moved)) < best:
                    point, best, has_moved = moved, found, True
                    break
        step = step if has_moved else step / 2
    return point
