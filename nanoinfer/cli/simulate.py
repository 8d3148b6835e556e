"""`nanoinfer simulate`: the figures of a workload on a machine that need not be here, with the engine's own scheduling."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.cli import options
from nanoinfer.cli.bench import WorkloadOptions, pick_workloads, print_percentiles
from nanoinfer.cli.bench import app as bench_app
from nanoinfer.cli.commands import Command
from nanoinfer.config import EngineArgs

if TYPE_CHECKING:
    from nanoinfer.lab.simulate.costs import ModelSizes

ConfigModel = Annotated[
    str | None, typer.Option("--model", "-m", help="A config.json, or what the other commands take. Default: tiny-qwen3.")
]


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions:
    """The arguments of LLM that change a simulation."""

    dtype: Annotated[str, EngineArgs] = "auto"
    quantization: Annotated[str | None, EngineArgs] = None
    tensor_parallel_size: Annotated[int, EngineArgs] = 1
    block_size: Annotated[int | None, EngineArgs] = None
    max_num_seqs: Annotated[int, EngineArgs] = 256
    max_num_batched_tokens: Annotated[int, EngineArgs] = 4096
    chunk_size: Annotated[int, EngineArgs] = 1024
    enable_chunked_prefill: Annotated[bool, EngineArgs] = True
    enable_prefix_caching: Annotated[bool, EngineArgs] = True
    max_model_len: Annotated[int | None, EngineArgs] = None
    kv_cache_memory: Annotated[int | None, EngineArgs] = None
    kv_cache_dtype: Annotated[str, EngineArgs] = "auto"
    gpu_memory_utilization: Annotated[float, EngineArgs] = 0.9
    scheduling_policy: Annotated[str, EngineArgs] = "fcfs"
    scheduler_cls: Annotated[str | None, EngineArgs] = None
    block_manager_cls: Annotated[str | None, EngineArgs] = None
    async_scheduling: Annotated[bool | None, EngineArgs] = None


@options.expand_options
def simulate(
    *,
    model: ConfigModel = None,
    hardware: Annotated[
        str,
        typer.Option(help="H100, H200, MI300X, M4, laptop, or a file of `bench roofline --json` or `bench calibrate`."),
    ] = "H100",
    picked: WorkloadOptions,
    engine: SimulatedOptions,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="With --tensor-parallel-size, each device has whole experts.")
    ] = False,
    num_engines: Annotated[int, typer.Option(min=1, help="Engines that take the requests in turns.")] = 1,
    num_prefill_engines: Annotated[
        int, typer.Option(min=0, help="How many of them compute prompts, and send keys and values to the others, which decode.")
    ] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a server on a machine by name: TTFT, TPOT and ITL of a workload, with the engine's own scheduler.

    No model runs. A step takes what its bytes and operations take at the machine's limits, and what was measured besides.
    """
    from nanoinfer.lab.simulate.disaggregated import simulate_engines
    from nanoinfer.lab.simulate.hardware import Hardware
    from nanoinfer.lab.simulate.simulator import requests_of

    sizes, machine, settings = read_sizes(model), Hardware.named(hardware), EngineArgs(**asdict(engine))
    engines: dict[str, Any] = {
        "num_engines": num_engines,
        "num_prefill_engines": num_prefill_engines,
        "enable_expert_parallel": enable_expert_parallel,
    }
    with options.busy("Simulating"):
        results = [
            (workload, simulate_engines(sizes, machine, settings, requests_of(workload), **engines))
            for workload in pick_workloads(picked)
        ]
    report = {
        "settings": asdict(engine) | engines | {"model": model},
        "hardware": asdict(machine),
        "results": [
            {"workload": workload.name, "figures": asdict(result.figures()), "counts": dict(result.counts)}
            | {"num_steps": result.num_steps, "num_blocks": result.num_blocks, "device_s": result.device_s}
            for workload, result in results
        ],
    }
    options.print_result(report, as_json, _print_tables)


@bench_app.command(cls=Command)
@options.expand_options
def calibrate(
    *,
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT...", help="What `serve --json` printed, of few requests at a time and of many."),
    ],
    model: ConfigModel = None,
    hardware: Annotated[str, typer.Option(help="Where the search begins: what `roofline --json` printed. Required.")] = "",
    engine: SimulatedOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Path of the result.")] = Path("server.json"),
    as_json: options.AsJson = False,
) -> None:
    """Fit a machine's limits and overheads to measured runs of a server, for `nanoinfer simulate --hardware`.

    The engine's options are those with which the server ran.
    """
    from nanoinfer.lab.simulate.calibrate import calibrate as fit
    from nanoinfer.lab.simulate.calibrate import read_runs
    from nanoinfer.lab.simulate.hardware import Hardware

    runs = [run for path in reports for run in read_runs(path)]
    with options.busy("Calibrating"):
        fitted = fit(read_sizes(model), Hardware.named(hardware), EngineArgs(**asdict(engine)), runs)
    output.write_text(json.dumps(asdict(fitted), indent=1), encoding="utf-8")
    options.print_result(asdict(fitted), as_json, lambda _: print(f"{output} is the --hardware of nanoinfer simulate"))


def read_sizes(model: str | None) -> "ModelSizes":
    """Read the sizes of a model from a config.json, or from the folder or the hub name of a checkpoint."""
    from nanoinfer.lab.simulate.costs import ModelSizes
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL, locate, read_json

    given = Path(model or DEFAULT_MODEL)
    path = given if given.is_file() else locate(model or DEFAULT_MODEL, None, with_weights=False) / "config.json"
    return ModelSizes.of(read_json(path))


def _print_tables(report: dict[str, Any]) -> None:
    print_percentiles([(result["workload"], result["figures"]) for result in report["results"]])
    for result in report["results"]:
        figures, counts = result["figures"], result["counts"]
        hits = counts["prefix_cache_hits"] / max(counts["prefix_cache_queries"], 1)
        print(
            f"{result['workload']}: {figures['num_requests']} requests in {figures['duration_s']:.2f} s, "
            f"{figures['output_tokens_per_s']:.1f} output tokens/s\n"
            f"{result['num_steps']} steps, {hits:.0%} of the prompts' tokens from the prefix cache, "
            f"{counts['num_preemptions']} preemptions"
        )
