"""What `nanoinfer simulate` predicts for a server, beside what `nanoinfer bench serve` measured.

python -m benchmarks.simulation FOLDER --model config.json --hardware hardware.json --settings default= seqs4=max_num_seqs=4

FOLDER has the measured reports as SETTING.TRACE.REPEAT.json. Start the server anew for each repeat and take the settings
interleaved, because a process or a minute may be slower than the next. A prediction is compared with the median of the repeats.
The bound of its error is 15%, or the range of the repeats divided by their median if that is larger. Errors beyond it are bold.
Times are in milliseconds: predicted (measured).
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from nanoinfer.config import EngineArgs
from nanoinfer_lab.bench.timing import percentiles
from nanoinfer_lab.simulate.calibrate import MeasuredRun, read_runs
from nanoinfer_lab.simulate.costs import ModelSizes
from nanoinfer_lab.simulate.hardware import Hardware
from nanoinfer_lab.simulate.simulator import requests_of, simulate

FIGURES = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
LEAST_BOUND = 0.15


def measured_ms(run: MeasuredRun) -> list[float]:
    """Return the FIGURES of a run."""
    found = percentiles(run.ttft_s), percentiles(run.tpot_s)
    return [value for one in found if one is not None for value in (one.p50, one.p99)]


def predicted_ms(sizes: ModelSizes, hardware: Hardware, settings: EngineArgs, run: MeasuredRun) -> list[float]:
    """Return the FIGURES of the simulation of a run."""
    figures = simulate(sizes, hardware, settings, requests_of(run.workload)).figures()
    return [value for one in (figures.ttft_ms, figures.tpot_ms) if one is not None for value in (one.p50, one.p99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", "-m", required=True, help="the config.json")
    parser.add_argument("--hardware", required=True, help="what `nanoinfer bench calibrate` wrote")
    parser.add_argument("--settings", nargs="+", default=["default="], help="NAME=ARGUMENT=NUMBER, or NAME= for the defaults")
    parser.add_argument("--traces", nargs="+", required=True, help="the traces that are predicted")
    given = parser.parse_args()
    sizes, hardware = ModelSizes.named(given.model), Hardware.named(given.hardware)
    print(f"| trace | setting | {' | '.join(FIGURES)} |\n|{'---|' * (2 + len(FIGURES))}")
    errors: dict[bool, list[float]] = defaultdict(list)  # whether within the bound -> the errors
    for trace in given.traces:
        for setting in given.settings:
            name, _, argument = setting.partition("=")
            changed, _, number = argument.partition("=")
            arguments: dict[str, Any] = {changed: int(number)} if changed else {}
            settings = EngineArgs(**arguments)
            runs = [run for path in sorted(given.folder.glob(f"{name}.{trace}.*.json")) for run in read_runs(path)]
            cells = []
            for value, *measured in zip(predicted_ms(sizes, hardware, settings, runs[0]), *map(measured_ms, runs), strict=True):
                median = statistics.median(measured)
                error, bound = value / median - 1, max(LEAST_BOUND, (max(measured) - min(measured)) / median)
                errors[abs(error) <= bound].append(abs(error))
                shown = f"{value:,.0f} ({', '.join(f'{one:,.0f}' for one in sorted(measured))})"
                cells.append(f"{shown} {error:+.0%}" if abs(error) <= bound else f"{shown} **{error:+.0%}**")
            print(f"| {trace} | {argument or name} | {' | '.join(cells)} |")
    within, outside = errors[True], errors[False]
    print(f"\n{len(within)} of {len(within) + len(outside)} within the bound, the largest error {max(within + outside):.0%}")


if __name__ == "__main__":
    main()
