"""Sweep and search the settings of a simulation, and show the runs: as a table, or as JSON.

In: a SimulatedRun for each choice of settings. Out: rows, plain values.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanoinfer.system.progress import progress_bar
from nanoinfer_lab.bench.timing import Figures
from nanoinfer_lab.simulate.simulator import Result

Choice = dict[str, Any]  # name of an option -> the value that a sweep has chosen

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
    return [run(choice) for choice in progress_bar("simulating", steps=choices)]


def find(run: Callable[[Choice], SimulatedRun], grid: Mapping[str, Sequence[Any]], start: Choice) -> list[SimulatedRun]:
    """Search the settings with the largest goodput, one setting after the other until none gains. The last run is the best.

    Among equals, the settings that were tried first win.

    Args:
        grid: the values of each setting.
        start: the values with which the search begins.
    """
    best = run(start)
    tried = [best]
    with progress_bar("searching", 0) as bar:
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
