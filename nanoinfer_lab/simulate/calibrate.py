"""Fit a Hardware to runs of a real server, so that the simulation of the runs gives the measured times.

In: reports of `nanoinfer bench serve --json`. Out: a Hardware. At least one run should have few requests at a time, and another
many, because their times tell the memory's bandwidth from the rate of products and from the overheads.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer_lab.bench.timing import RequestTiming
from nanoinfer_lab.bench.workloads import Workload
from nanoinfer_lab.simulate.costs import ModelSizes
from nanoinfer_lab.simulate.hardware import Hardware, Overheads
from nanoinfer_lab.simulate.simulator import requests_of, simulate

# Where the search begins: the factors of the bandwidth and the rates, 1 - overlap, and the seconds of Overheads.
START = (1.0, 1.0, 0.5, 1e-3, 1e-4, 1e-3, 1e-3)
STEP, LEAST_STEP = 0.4, 0.02  # of the search, in logarithms: factors of 1.5 and of 1.02


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a server: its workload, and the seconds of its requests. tpot_s: of the answers of several tokens."""

    workload: Workload
    ttft_s: list[float]
    tpot_s: list[float]


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read a report of `nanoinfer bench serve --json`. Raises: InvalidValueError: the file has another form."""
    try:
        results = json.loads(path.read_text(encoding="utf-8-sig"))["results"]
        return [_run_of(_workload_of(found["workload"]), run["requests"]) for found in results for run in found["runs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValueError(
            f"{path} must be what `nanoinfer bench serve --json` printed, with no failed request and --ignore-eos ({error})"
        ) from error


def _workload_of(given: dict[str, Any]) -> Workload:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Workload(**fields)


def _run_of(workload: Workload, rows: list[dict[str, Any]]) -> MeasuredRun:
    for row, length in zip(rows, workload.output_lens, strict=True):
        if row["num_output_tokens"] != length:
            raise ValueError(f"an answer has {row['num_output_tokens']} tokens instead of {length}")
    return MeasuredRun(
        workload,
        [row["ttft_ms"] / 1e3 for row in rows],
        [row["tpot_ms"] / 1e3 for row in rows if row["tpot_ms"] is not None],
    )


def calibrate(sizes: ModelSizes, hardware: Hardware, settings: EngineArgs, runs: Iterable[MeasuredRun]) -> Hardware:
    """Return the hardware with the bandwidth, the rate and the overheads for which the simulated times are nearest.

    The distance of two runs is the mean of |log(simulated / measured)| of TTFT and TPOT, of the fastest request of each run,
    the second fastest and so on: which of several requests comes first is chance.

    Args:
        hardware: what `bench roofline` measured. Its overheads are not used.
        settings: the arguments of the server's LLM.
    """
    measured = list(runs)
    workloads: list[Workload] = []  # a dict cannot have them as keys, and all described workloads have the same name
    for run in measured:
        if run.workload not in workloads:
            workloads.append(run.workload)
    numbered = [(run, workloads.index(run.workload)) for run in measured]

    def loss(logarithms: list[float]) -> float:
        machine = _with(hardware, logarithms)
        timings = [simulate(sizes, machine, settings, requests_of(workload)).timings for workload in workloads]
        return sum(_distance(run, timings[number]) for run, number in numbered) / len(measured)

    return _with(hardware, _least([math.log(value) for value in START], loss))


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


def _distance(run: MeasuredRun, timings: list[RequestTiming]) -> float:
    ttft_s = [timing.ttft for timing in timings]
    tpot_s = [timing.tpot for timing in timings if timing.num_output_tokens > 1]
    pairs = [*zip(sorted(ttft_s), sorted(run.ttft_s), strict=True), *zip(sorted(tpot_s), sorted(run.tpot_s), strict=True)]
    return sum(abs(math.log(simulated / measured)) for simulated, measured in pairs) / len(pairs)


def _least(point: list[float], loss: Callable[[list[float]], float]) -> list[float]:
    """Find a minimum by moving along one axis at a time, with smaller steps when no step helps (Hooke and Jeeves 1961)."""
    best, step = loss(point), STEP
    bar = tqdm(desc="smaller steps", total=math.ceil(math.log2(STEP / LEAST_STEP)), leave=False, disable=None)
    while step > LEAST_STEP:
        has_moved = False
        for axis in range(len(point)):
            for change in (step, -step):
                moved = [*point[:axis], point[axis] + change, *point[axis + 1 :]]
                if (found := loss(moved)) < 0.999 * best:
                    point, best, has_moved = moved, found, True
                    break
        if not has_moved:
            step /= 2
            bar.update()
    bar.close()
    return point
