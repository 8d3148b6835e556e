"""`nanoinfer simulate`: the figures of a workload on a machine that need not be here, with the engine's own scheduling."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from nanoinfer.arguments import declarations
from nanoinfer.cli import options
from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError, suggest
from nanoinfer_lab.cli.bench import ConfigModel, Goodput, SimulatedOptions, WorkloadOptions, pick_workloads

if TYPE_CHECKING:
    from nanoinfer_lab.simulate.report import Choice, SimulatedRun

G = TypeVar("G")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """What runs where."""

    model: ConfigModel = None
    hardware: Annotated[
        str,
        typer.Option(
            help="H100, H200, MI300X, M4, laptop, or a file of `nanoinfer bench roofline --json` or `bench calibrate`."
        ),
    ] = "H100"
    price: Annotated[float | None, typer.Option(min=0, help="Price of a device per hour, for the cost of tokens.")] = None
    num_engines: Annotated[int, typer.Option(min=1, help="Engines that take the requests round-robin.")] = 1
    num_prefill_engines: Annotated[
        int, typer.Option(min=0, help="How many of them compute prompts, and send keys and values to the others, which decode.")
    ] = 0


@options.expand_options
def simulate(
    *,
    machine: MachineOptions,
    picked: WorkloadOptions,
    engine: SimulatedOptions,
    goodput: Goodput = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Values of an option, such as max_num_seqs=8,16,32. Given twice, every combination is simulated.",
        ),
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            metavar="goodput",
            help="Search the settings with the largest goodput, among those of --sweep. Default: max_num_seqs, "
            "max_num_batched_tokens and chunk_size.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a server on a machine by name: TTFT, TPOT and ITL of a workload, with the engine's own scheduler.

    No model runs. A step takes what its bytes and operations take at the machine's limits, and what was measured besides.
    """
    from nanoinfer_lab.bench.timing import parse_goodput
    from nanoinfer_lab.simulate import report

    groups = machine, picked, engine
    given = {name: value for group in groups for name, value in asdict(group).items()}
    limits, swept = parse_goodput(goodput or []), _swept(sweep or [], map(type, groups))
    workloads = [] if swept.keys() & asdict(picked) else [workload.name for workload in pick_workloads(picked)]
    values: dict[str, Sequence[Any]] = {"workload": workloads} if len(workloads) > 1 else {}
    values |= swept
    options.import_modules(None, sweep, engine.scheduler_cls, engine.block_manager_cls)
    if find is not None and (find != "goodput" or not limits or len(workloads) > 1):
        hint = "with the limits of --goodput and one workload; give them, or leave --find out"
        raise InvalidValueError(f"--find must be goodput, {hint}, got {find!r}")
    with options.busy("Simulating"):
        run = partial(_run, machine, picked, engine, limits)
        if find is None:
            runs = report.sweep(run, values)
        else:
            grid = values or report.GRID
            runs = report.find(run, grid, {name: given[name] for name in grid})
    shown = runs if find is None else runs[-1:]
    found = {"settings": given, "results": [one.as_json() for one in runs]}
    options.print_result(found, as_json, lambda _: _print_runs(*report.table(shown)))


def _run(
    machine: MachineOptions, picked: WorkloadOptions, engine: SimulatedOptions, limits: dict[str, float], choice: "Choice"
) -> "SimulatedRun":
    """Simulate with other values of some options."""
    from nanoinfer_lab.simulate.costs import ModelSizes
    from nanoinfer_lab.simulate.disaggregated import simulate_engines
    from nanoinfer_lab.simulate.hardware import Hardware
    from nanoinfer_lab.simulate.report import SimulatedRun
    from nanoinfer_lab.simulate.simulator import requests_of

    machine, engine = _with(machine, choice), _with(engine, choice)
    [workload] = pick_workloads(_with(picked, choice))
    result = simulate_engines(
        ModelSizes.named(machine.model),
        Hardware.named(machine.hardware),
        EngineArgs(**asdict(engine)),
        requests_of(workload),
        num_engines=machine.num_engines,
        num_prefill_engines=machine.num_prefill_engines,
    )
    num_devices = machine.num_engines * engine.tensor_parallel_size
    return SimulatedRun.of(choice, result, limits, None if machine.price is None else machine.price * num_devices)


def _with(group: G, choice: "Choice") -> G:
    """Return the options with the values of a choice that belong to them."""
    return replace(group, **{name: value for name, value in choice.items() if hasattr(group, name)})  # type: ignore[type-var]


def _swept(texts: list[str], groups: Iterable[Any]) -> dict[str, list[Any]]:
    """Read NAME=VALUES. groups: the classes of the options that may be swept."""
    kinds: dict[str, Any] = {name: one.kind for group in groups for name, one in declarations(group).items()}
    found = {}
    for text in texts:
        name, _, values = text.removeprefix("--").partition("=")
        if (name := name.replace("-", "_")) not in kinds:
            raise InvalidValueError(f"--sweep has no option {name!r}; {suggest(name, list(kinds))}")
        is_text = kinds[name] in (str, Path)
        read: Callable[[str], Any] = kinds[name] if is_text else partial(options.read_json, f"--sweep {name}")
        found[name] = [read(value) for value in values.split(",")]
    return found


def _print_runs(columns: list[str], rows: list[list[str]]) -> None:
    """Print a row for each run, or the figures of a single run below each other."""
    if len(rows) > 1:
        options.print_table(columns, rows)
    else:
        options.print_table(("", ""), list(zip(columns, rows[0], strict=True)))
