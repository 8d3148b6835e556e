"""Show simulated runs: as a table, as JSON, or as one page with plots.

In: a SimulatedRun for each choice of settings. Out: rows, plain values, HTML (report.html, which needs no other file).
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanoinfer.features.tracing import viewer
from nanoinfer_lab.bench.timing import Figures
from nanoinfer_lab.simulate.simulator import Result

Choice = dict[str, Any]  # name of an option -> the value that a sweep has chosen

PERCENTS = (*range(0, 100, 2), 99, 99.5, 100)  # of the plotted distributions
NUM_TIMES = 200  # at which the requests in the system are counted
TITLES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Times between two tokens"}
# setting -> values among which --find chooses
GRID = {
    "max_num_seqs": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "max_num_batched_tokens": (256, 512, 1024, 2048, 4096, 8192),
    "chunk_size": (64, 128, 256, 512, 1024, 2048),
}


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A simulated run."""

    choice: Choice  # what a sweep has chosen. {}: there is no sweep
    result: Result
    figures: Figures  # the figures of `nanoinfer bench`, with goodput if there are limits
    cost: float | None  # the price of a million output tokens, in the currency of the machine's price. None: it is unknown

    @classmethod
    def of(cls, choice: Choice, result: Result, limits: Mapping[str, float], price_per_hour: float | None) -> "SimulatedRun":
        """Compute the figures. limits: as `goodput` of timing.figures. price_per_hour: of all devices together."""
        figures = result.figures(limits)
        cost = None
        if price_per_hour is not None:
            cost = price_per_hour * figures.duration_s / 3600 / figures.num_output_tokens * 1e6
        return cls(choice, result, figures, cost)

    def as_json(self) -> dict[str, object]:
        return {
            "choice": self.choice,
            "figures": self.figures,
            "counts": dict(self.result.counts),
            "cost_per_million_output_tokens": self.cost,
            **{name: getattr(self.result, name) for name in ("num_steps", "num_blocks", "device_s")},
        }


def sweep(run: Callable[[Choice], SimulatedRun], values: Mapping[str, Sequence[Any]]) -> list[SimulatedRun]:
    """Run every combination of the values of some options."""
    choices = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    return [run(choice) for choice in tqdm(choices, "simulating", delay=2, leave=False, disable=None)]


def find(run: Callable[[Choice], SimulatedRun], grid: Mapping[str, Sequence[Any]], start: Choice) -> list[SimulatedRun]:
    """Search the settings with the largest goodput, one setting after the other until none gains. The last run is the best.

    Among equals, the settings that were tried first win.

    Args:
        grid: the values of each setting.
        start: the values with which the search begins.
    """
    best = run(start)
    tried = [best]
    with tqdm(desc="searching", total=0, delay=2, leave=False, disable=None) as bar:
        while True:
            before = best
            bar.total += sum(map(len, grid.values()))  # another round
            for name, values in grid.items():
                runs = [run(best.choice | {name: value}) for value in values if value != best.choice[name]]
                bar.update(len(values))
                tried += runs
                best = max([best, *runs], key=lambda one: one.figures.goodput_requests_per_s or 0.0)
            if best is before:
                return [*tried, best]


# ---- a table


def table(runs: Sequence[SimulatedRun]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows. Columns without a value are left out."""
    percentiles = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"))
    columns: dict[str, Callable[[SimulatedRun], object]] = {
        "out tok/s": lambda run: run.figures.output_tokens_per_s,
        **{f"{figure.upper()} {p} ms": partial(_percentile, figure=figure, percentile=p) for figure, p in percentiles},
        "goodput/s": lambda run: run.figures.goodput_requests_per_s,
        "cache hits": lambda run: f"{run.result.counts['prefix_cache_hits'] / run.result.counts['prefix_cache_queries']:.0%}",
        "preempted": lambda run: run.result.counts["num_preemptions"],
        "per M tok": lambda run: run.cost,
    }
    cells = {name: [run.choice[name] for run in runs] for name in runs[0].choice}
    cells |= {name: [value(run) for run in runs] for name, value in columns.items()}
    shown = {name: values for name, values in cells.items() if any(value is not None for value in values)}
    return list(shown), [list(map(_shown, row)) for row in zip(*shown.values(), strict=True)]


def _percentile(run: SimulatedRun, figure: str, percentile: str) -> float | None:
    found = getattr(run.figures, f"{figure}_ms")
    return None if found is None else getattr(found, percentile)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
    return "" if value is None else str(value)


# ---- a page


def page(about: str, runs: Sequence[SimulatedRun], limits: Mapping[str, float]) -> str:
    """Return a page with the table and plots: of the distributions of a single run, or of the figures of a sweep.

    Args:
        about: what was simulated, in a sentence.
        limits: the limits in ms of the goodput.
    """
    columns, rows = table(runs)
    plots = _plots_of_a_sweep(runs, limits) if len(runs) > 1 else _plots_of_a_run(runs[0].result, limits)
    data = {"about": about, "columns": columns, "rows": rows, "plots": plots}
    return viewer.fill(Path(__file__).with_name("report.html"), {"/* REPORT */ {}": viewer.as_script(data)})


def _plots_of_a_run(result: Result, limits: Mapping[str, float]) -> list[dict[str, Any]]:
    timings, at = result.timings, np.linspace(0.0, result.end_s, NUM_TIMES)
    ttfts, tpots = [timing.ttft for timing in timings], [timing.tpot for timing in timings if timing.num_output_tokens > 1]
    seconds: dict[str, Any] = {"ttft": np.percentile(ttfts, PERCENTS)}
    if tpots:
        seconds |= {"tpot": np.percentile(tpots, PERCENTS), "itl": list(map(result.inter_token_s.percentile, PERCENTS))}
    milliseconds = {"label": "ms", "isLog": True}
    plots = [
        _plot(
            name,
            milliseconds,
            "% that take at most so long",
            {name.upper(): zip((1e3 * s for s in found), PERCENTS, strict=True)},
            limits,
        )
        for name, found in seconds.items()
    ]

    def num_until(times: list[float]) -> Any:
        return np.searchsorted(np.sort(times), at, side="right")

    num_started = num_until([timing.token_times[0] for timing in timings])
    waiting = num_until([timing.arrival for timing in timings]) - num_started
    answered = num_started - num_until([timing.token_times[-1] for timing in timings])
    counts = {"wait for their first token": waiting, "get tokens": answered}
    lines = {name: zip(at.tolist(), found.tolist(), strict=True) for name, found in counts.items()}
    return [*plots, _plot("Requests in the system", {"label": "seconds"}, "requests", lines, {})]


def _plots_of_a_sweep(runs: Sequence[SimulatedRun], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Plot each figure over the option that was swept last, with a line for each combination of the others."""
    *others, last = runs[0].choice
    labels = list(dict.fromkeys(str(run.choice[last]) for run in runs))
    runs_of = defaultdict(list)
    for run in runs:
        runs_of[", ".join(f"{name}={run.choice[name]}" for name in others) or last].append(run)
    values: dict[str, tuple[str, Callable[[SimulatedRun], float | None]]] = {
        "Goodput": ("requests/s within the limits", lambda run: run.figures.goodput_requests_per_s),
        "Output tokens": ("tokens/s", lambda run: run.figures.output_tokens_per_s),
        **{name: ("ms, 99th percentile", partial(_percentile, figure=name, percentile="p99")) for name in TITLES},
        "Cost": ("per million output tokens", lambda run: run.cost),
    }
    plots = []
    for title, (unit, value) in values.items():
        lines = {
            name: [(labels.index(str(one.choice[last])), y) for one in of_line if (y := value(one)) is not None]
            for name, of_line in runs_of.items()
        }
        if any(lines.values()):
            plots.append(_plot(title, {"label": last, "labels": labels}, unit, lines, limits))
    return plots


def _plot(
    name: str, x: dict[str, Any], y: str, lines: Mapping[str, Iterable[tuple[float, float]]], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Describe a plot for report.html, with the limit of this name if there is one.

    Args:
        name: a title, or a name of TITLES.
        x: the axis: its label, whether it is logarithmic (isLog), or the labels of points 0, 1, 2 ...
        y: the label of the other axis.
        lines: the points of each line.
    """
    limit = {"at": limits[name], "isAcross": "labels" in x} if name in limits else None
    series = [{"name": line, "points": list(points)} for line, points in lines.items()]
    return {"title": TITLES.get(name, name), "x": x, "y": y, "limit": limit, "series": series}
