"""`nanoinfer bench`: its options, its commands and its tables. The files of ../bench/ measure.

The functions import the modules that measure when they are called, because torch takes a second to import.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.cli import options
from nanoinfer.cli.commands import Command, Commands, complete_from
from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError

if TYPE_CHECKING:
    from nanoinfer_lab.bench.serve import ServeFigures
    from nanoinfer_lab.bench.timing import F, Figures, Measurement
    from nanoinfer_lab.bench.workloads import Workload

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure a model on this machine, or a server.",
    epilog="nanoinfer bench throughput --workload B16",
)

DEFINITIONS = """\
TTFT, time to first token: from a request's arrival to its first token.

TPOT, time per output token, of one request: (last token - first token) / (tokens - 1).

ITL, inter-token latency: the times between consecutive tokens of a request, over all requests.

Tokens per second: output tokens divided by the time from the first arrival to the last token, prefill included."""

WORKLOADS_HELP = """\
Workloads: A one stream (32 tokens in, 128 out); B16, B64 batches (64 in, 64 out); C prefill (1,023 in, 1 out); D 32 requests of
mixed lengths (16-256 in, 16-128 out); E 64 sampled streams (1 in, 128 out, top_k 40, top_p 0.9); F for a GPU, 256
requests (100-1,024 in and out). All but E are greedy."""

SERVE_DEFINITIONS = """\
Figures: TTFT, from sending a request, a new connection included, to the first chunk with text. ITL, the times between chunks: a
chunk may have several tokens, and the table says how many. TPOT, (last chunk - first chunk) / (tokens - 1). E2EL, to the last
chunk. Numbers of tokens are the server's usage. Goodput, requests per second that keep every limit of --goodput."""

DEFAULT_WORKLOADS = "A,B16"

ConfigModel = Annotated[
    str | None, typer.Option("--model", "-m", help="A config.json, a folder that has one, or a hub name. Default: tiny-qwen3.")
]
RandomModel = Annotated[
    str | None,
    typer.Option(
        help="Random weights instead of a model: gpt2, gpt2-medium, qwen2.5-0.5b, qwen3-0.6b or qwen3.5-0.8b.",
        autocompletion=complete_from("gpt2", "gpt2-medium", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3.5-0.8b"),
    ),
]
Named = Annotated[str | None, typer.Option("--workload", help="Some of A,B16,B64,C,D,E,F, with commas. Default: A,B16.")]
Goodput = Annotated[list[str] | None, typer.Option(help='Limits in ms: "ttft:200 tpot:50 e2el:2000", or some of them.')]
Repeats = Annotated[int, typer.Option(min=1, help="Measured runs, after one to warm up.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its dtype and its device, for commands that measure with settings of their own."""

    model: options.Model = None
    random_model: RandomModel = None
    dtype: Annotated[str, EngineArgs] = "auto"
    device: Annotated[str, EngineArgs] = "auto"
    imports: options.Imports = None


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Workloads by name, or a workload that the user describes."""

    workload: Named = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded requests: JSON lines with timestamp (ms), input_length, output_length and perhaps hash_ids, as in "
            "Mooncake's traces, or a CSV file of Azure's. --num-prompts takes the first ones.",
        ),
    ] = None
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests of a workload of your own, which the next options describe.")
    ] = None
    input_len: Annotated[str, typer.Option(help="Tokens per prompt: 128, or drawn from 16-256.")] = "128"
    output_len: Annotated[str, typer.Option(help="Tokens per answer, in the same form.")] = "128"
    request_rate: Annotated[float, typer.Option(help="Requests per second, at random times; inf is all at once.")] = math.inf
    burstiness: Annotated[
        float, typer.Option(help="1 is a Poisson process. Below 1, requests come in bursts, above 1 more evenly.")
    ] = 1.0
    turns: Annotated[
        int, typer.Option(min=1, help="Requests of a session. Each prompt repeats the session and adds --input-len.")
    ] = 1
    think_time: Annotated[float, typer.Option(help="Mean seconds between two requests of a session.")] = 10.0
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 is off.")] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths and the arrival times.")] = 0


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


def pick_workloads(picked: WorkloadOptions) -> list["Workload"]:
    """Return the workloads by their names, or the described workload. Raises: InvalidValueError."""
    from nanoinfer_lab.bench import workloads

    sampling = {name: getattr(picked, name) for name in ("temperature", "top_k", "top_p")}
    if picked.trace is not None:
        if picked != WorkloadOptions(trace=picked.trace, num_prompts=picked.num_prompts, **sampling):
            raise InvalidValueError(
                "--trace gives the lengths and the arrivals; leave --workload, --input-len, --output-len, --request-rate, "
                "--burstiness, --turns, --think-time and --seed out"
            )
        return [workloads.recorded(picked.trace, num_prompts=picked.num_prompts, sampling=sampling)]
    if picked.num_prompts is None:
        if picked != WorkloadOptions(workload=picked.workload):
            raise InvalidValueError(
                "--input-len, --output-len, --request-rate, --burstiness, --turns, --think-time, --temperature, --top-k, "
                "--top-p and --seed describe a workload of your own; give --num-prompts, too"
            )
        return workloads.named(picked.workload or DEFAULT_WORKLOADS)
    if picked.workload is not None:
        raise InvalidValueError("give --workload, or --num-prompts for a workload of your own, not both")
    described = asdict(picked)
    for name in ("workload", "trace", *sampling):
        del described[name]
    return [workloads.described(sampling=sampling, **described)]


@app.command(cls=Command, epilog="nanoinfer bench roofline --random-model gpt2")
@options.expand_options
def roofline(
    *, measured: ModelOptions, enforce_eager: Annotated[bool, EngineArgs] = False, as_json: options.AsJson = False
) -> None:
    """Compare the time of prefill and decode steps with the limits of this machine."""
    from nanoinfer.loading import devices
    from nanoinfer.system import environment
    from nanoinfer_lab.bench import roofline as measurement
    from nanoinfer_lab.bench.random_models import checkpoint_of

    options.import_modules(measured.imports)
    device = devices.resolve_device(measured.device)
    with checkpoint_of(measured.model, measured.random_model, measured.dtype) as checkpoint, options.busy("Measuring"):
        machine, dtype, phases = measurement.run(
            checkpoint, dtype=measured.dtype, device=measured.device, enforce_eager=enforce_eager
        )
    report = {
        "bandwidth_GB_per_s": machine.bandwidth / 1e9,
        "gemm_GFLOP_per_s": {str(d).removeprefix("torch."): rate / 1e9 for d, rate in machine.gemm_rates.items()},
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "memory_bytes": environment.memory_bytes(device),
        "phases": [
            {
                "name": phase.name,
                "num_decoding": phase.num_decoding,
                "measured_ms": phase.measured_s * 1e3,
                "least_ms": phase.least_s(machine, dtype) * 1e3,
                "share_of_limit": phase.least_s(machine, dtype) / phase.measured_s,
                "parts": [
                    asdict(part) | {"least_ms": part.seconds(machine.bandwidth, machine.gemm_rates[dtype]) * 1e3}
                    for part in phase.parts
                ],
            }
            for phase in phases
        ],
    }
    options.print_result(report, as_json, _show_roofline)


def _show_roofline(report: dict[str, Any]) -> None:
    rates = ", ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in report["gemm_GFLOP_per_s"].items())
    print(f"memory {report['bandwidth_GB_per_s']:.1f} GB/s; matrix products {rates}; the model in {report['dtype']}")
    rows: list[list[str]] = []
    for phase in report["phases"]:
        for part in phase["parts"]:
            numbers = (part["num_bytes"] / 1e6, part["num_operations"] / 1e9, part["least_ms"])
            rows.append(["", part["name"], *(f"{number:.2f}" for number in numbers)])
        measured, share = f"{phase['measured_ms']:.2f}", f"{phase['share_of_limit']:.0%}"
        rows += [[phase["name"], "all", "", "", f"{phase['least_ms']:.2f}", measured, share], []]
    options.print_table(("phase", "part", "MB", "GFLOP", "at least ms", "measured ms", "share of the limit"), rows)


LADDER_HELP = """\
Measure eleven versions of an engine on this CPU, each with a further idea, in a few minutes.

The first four are those of notebook 00b: the whole text again for each token, a KV cache, a batch, continuous batching. The
others are the engine, each with a further idea. 16 sampled requests (128 tokens in, 12 or 36 out) share three quarters of their
prompts.

Bandwidth: the bytes that a version's steps have to read and write, each weight once per step, by what the memory can deliver in
that time. Drafts gain only where a model's text repeats itself, so try them with a model of your own (-m)."""


@app.command(cls=Command, help=LADDER_HELP, epilog="nanoinfer bench ladder")
@options.expand_options
def ladder(
    *,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As in `generate`. Default: random weights of GPT-2's sizes.")
    ] = None,
    random_model: RandomModel = None,
    dtype: Annotated[str, EngineArgs] = "float32",
    imports: options.Imports = None,
    repeats: Repeats = 3,
    as_json: options.AsJson = False,
) -> None:
    import torch

    from nanoinfer_lab.bench import ladder as measurement
    from nanoinfer_lab.bench.random_models import checkpoint_of
    from nanoinfer_lab.bench.roofline import measure_bandwidth

    options.import_modules(imports)
    if model is None and random_model is None:
        random_model = "gpt2"
    bandwidth, workload = measure_bandwidth(torch.device("cpu")), measurement.WORKLOAD
    with checkpoint_of(model, random_model, dtype) as checkpoint, options.busy("Measuring 11 versions, some minutes"):
        rungs = [asdict(rung) for rung in measurement.climb(checkpoint, workload, bandwidth, repeats=repeats, dtype=dtype)]
    machine = f"{random_model or model} in {dtype}, {torch.get_num_threads()} threads, memory {bandwidth / 1e9:.1f} GB/s"
    options.print_result({"machine": machine, "rungs": rungs}, as_json, _show_ladder)


def _show_ladder(report: dict[str, Any]) -> None:
    rows = [
        (rung["version"], f"{rung['tokens_per_s']:.1f}", f"{rung['bandwidth_share']:.1%}", f"{rung['longest_pause_ms']:.0f}")
        for rung in report["rungs"]
    ]
    options.print_table(("version", "tok/s", "bandwidth", "longest pause ms"), rows)
    print(report["machine"])


def _print_report(
    settings: dict[str, object], results: "list[Measurement[F]]", as_json: bool, show: "Callable[[list[Measurement[F]]], None]"
) -> None:
    """Print what was measured as tables, or with its origin as JSON, which `bench compare` reads.

    settings: the options by name, and what was chosen in the place of auto.
    """
    from nanoinfer.system import environment

    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": environment.machine(),
        "versions": environment.versions(),
        "settings": settings,
        "results": results,
    }
    options.print_result(report, as_json, lambda _: show(results))


def _show_throughput(results: "list[Measurement[Figures]]") -> None:
    rows = []
    for result in results:
        figures = result.figures
        ttft = f"{figures.ttft_ms.p50:.0f}" if figures.ttft_ms else ""
        speeds = [run.figures.output_tokens_per_s for run in result.runs]
        shown = (f"{figures.output_tokens_per_s:.1f}", f"{min(speeds):.1f}-{max(speeds):.1f}")
        rows.append((result.workload.name, str(figures.num_requests), *shown, f"{figures.total_tokens_per_s:.0f}", ttft))
    options.print_table(("workload", "requests", "output tok/s", "all runs", "total tok/s", "TTFT ms"), rows)


def _show_percentiles(results: "list[Measurement[F]]") -> None:
    rows = [
        (result.workload.name, name.removesuffix("_ms").upper(), *(f"{value:.2f}" for value in percentiles.values()))
        for result in results
        for name, percentiles in asdict(result.figures).items()
        if name.endswith("_ms") and percentiles is not None
    ]
    options.print_table(("workload", "figure", "mean ms", "p50 ms", "p95 ms", "p99 ms"), rows)


def _add_measurement(name: str, purpose: str, show: "Callable[[list[Measurement[Figures]]], None]") -> None:
    """Add a command that runs workloads on an LLM. show: prints the figures."""

    about = f"{purpose}\n\n{WORKLOADS_HELP}\n\n{DEFINITIONS}"

    @app.command(name, cls=Command, help=about, epilog=f"nanoinfer bench {name} --num-prompts 8 --request-rate 4")
    @options.expand_options
    def measure(
        *,
        picked: WorkloadOptions,
        random_model: RandomModel = None,
        repeats: Repeats = 3,
        engine: options.EngineOptions,
        batching: options.BatchingOptions,
        as_json: options.AsJson = False,
    ) -> None:
        import torch

        from nanoinfer_lab.bench import offline
        from nanoinfer_lab.bench.random_models import checkpoint_of

        workloads = pick_workloads(picked)
        with checkpoint_of(engine.model, random_model, engine.dtype) as checkpoint, options.busy("Measuring"):
            arguments = options.llm_arguments(engine, model=checkpoint, **asdict(batching))
            chosen, results = offline.measure(workloads=workloads, repeats=repeats, **arguments)
        settings = asdict(engine) | asdict(batching) | asdict(chosen)
        settings |= {"random_model": random_model, "repeats": repeats, "threads": torch.get_num_threads()}
        _print_report(settings, results, as_json, show)


_add_measurement("throughput", "Measure tokens per second.", _show_throughput)
_add_measurement("latency", "Measure TTFT, TPOT and ITL: their 50th, 95th and 99th percentiles.", _show_percentiles)


@app.command(
    cls=Command,
    help=f"Measure an OpenAI-compatible server from outside.\n\n{WORKLOADS_HELP}\n\n{SERVE_DEFINITIONS}",
    epilog="nanoinfer bench serve --url http://127.0.0.1:8000 --num-prompts 32",
)
@options.expand_options
def serve(
    *,
    url: Annotated[str | None, typer.Option(help="The server, such as http://127.0.0.1:8000. Required.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key. Default: OPENAI_API_KEY of the environment.")] = None,
    picked: WorkloadOptions,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum requests in flight. Default: no limit.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send words to /chat/completions, not ids to /completions.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length. OpenAI's servers refuse the field.")] = True,
    goodput: Goodput = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds without a byte after which a request has failed.")] = 600,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs, each after a request to warm up.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    if url is None:
        raise InvalidValueError("give the --url of a server; `nanoinfer serve` starts one at http://127.0.0.1:8000")
    from nanoinfer_lab.bench import serve as measurement
    from nanoinfer_lab.bench.client import Client
    from nanoinfer_lab.bench.timing import parse_goodput

    limits = parse_goodput(goodput or [])
    workloads = pick_workloads(picked)
    client = Client(url, api_key=api_key or os.environ.get("OPENAI_API_KEY"), timeout=timeout)
    target = measurement.Target(
        client=client, model=model or client.first_model(), is_chat=chat, ignore_eos=ignore_eos, max_concurrency=max_concurrency
    )
    with options.busy("Measuring"):
        results = measurement.measure(target, workloads, limits, repeats=repeats)
    named = ("model", "is_chat", "ignore_eos", "max_concurrency")
    settings = {"url": client.url, "goodput": limits} | {name: getattr(target, name) for name in named}
    _print_report(settings, results, as_json, _show_serves)
    if any(run.figures.num_failed for result in results for run in result.runs):
        raise typer.Exit(1)


def _show_serves(results: "list[Measurement[ServeFigures]]") -> None:
    _show_percentiles(results)
    for result in results:
        for run in result.runs:
            _show_serve(result.workload.name, run.figures)


def _show_serve(workload: str, figures: "ServeFigures") -> None:
    goodput = figures.goodput_requests_per_s
    shown_goodput = "" if goodput is None else f"goodput {goodput:.2f} requests/s, "
    per_token = figures.client_cpu_s / max(figures.num_output_tokens, 1)
    share = figures.client_cpu_s / figures.duration_s if figures.duration_s else 0.0
    print(
        f"{workload}: {figures.num_requests} requests in {figures.duration_s:.2f} s, {figures.num_failed} failed\n"
        f"{figures.requests_per_s:.2f} requests/s, {shown_goodput}{figures.output_tokens_per_s:.1f} output tokens/s, "
        f"{figures.total_tokens_per_s:.1f} with the prompts'\n"
        f"{figures.num_output_tokens} output tokens, {figures.tokens_per_chunk:.2f} per chunk\n"
        f"this client took {share:.0%} of one core, {per_token * 1e6:.0f} us per token"
    )
    for message, count in figures.failures.items():
        print(f"failed {count} times: {message}")


@app.command(cls=Command, epilog="nanoinfer bench calibrate few.json many.json --hardware here.json")
@options.expand_options
def calibrate(
    *,
    reports: Annotated[
        list[Path],
        typer.Argument(metavar="REPORT...", help="What `serve --json` printed, of few requests at a time and of many."),
    ],
    model: ConfigModel = None,
    hardware: Annotated[str, typer.Option(help="Where the search begins: what `roofline --json` printed.")],
    engine: SimulatedOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Path of the result.")] = Path("server.json"),
    as_json: options.AsJson = False,
) -> None:
    """Fit a machine's limits and overheads to measured runs of a server, for `nanoinfer simulate --hardware`.

    The engine's options are those with which the server ran.
    """
    from nanoinfer_lab.simulate.calibrate import calibrate as fit
    from nanoinfer_lab.simulate.calibrate import read_runs
    from nanoinfer_lab.simulate.costs import ModelSizes
    from nanoinfer_lab.simulate.hardware import Hardware

    options.check_writable(output)
    runs = [run for path in reports for run in read_runs(path)]
    with options.busy("Calibrating, which simulates the runs some hundred times"):
        fitted = fit(ModelSizes.named(model), Hardware.named(hardware), EngineArgs(**asdict(engine)), runs)
    output.write_text(json.dumps(asdict(fitted), indent=1), encoding="utf-8")
    options.print_result(asdict(fitted), as_json, lambda _: print(f"{output} is the --hardware of nanoinfer simulate"))


@app.command(cls=Command, epilog="nanoinfer bench compare before.json after.json")
@options.expand_options
def compare(
    *,
    first: Annotated[Path, typer.Argument(metavar="A", help="What `throughput`, `latency` or `serve` printed with --json.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The same, with other settings.")],
    as_json: options.AsJson = False,
) -> None:
    """Compare two reports of the same workloads, and say whether they differ.

    A figure differs if the 95% interval of the ratio does not contain 1: Welch's t interval of the ratio of the runs' geometric
    means. It covers how runs of one process vary, not how days or machines do. A figure with a single run has no interval.
    """
    from nanoinfer_lab.bench import comparison

    reports = comparison.read_report(first), comparison.read_report(second)
    comparisons = comparison.compare(*reports)
    for part in ("machine", "versions"):
        if different := comparison.differences(*reports, part):
            print(f"warning: different {part}: {'; '.join(different)}", file=sys.stderr)
    for path, report in zip((first, second), reports, strict=True):
        if failed := comparison.num_failed(report):
            print(f"warning: failed requests of {path}, which are in no figure: {failed}", file=sys.stderr)
    found = {
        "reports": [str(first), str(second)],
        "settings": comparison.differences(*reports, "settings"),
        "comparisons": [asdict(one) | {"verdict": one.verdict} for one in comparisons],
    }
    options.print_result(found, as_json, _show_comparisons)


def _show_comparisons(found: dict[str, Any]) -> None:
    rows = []
    for one in found["comparisons"]:
        interval = "" if one["ratio"]["low"] is None else f"{one['ratio']['low']:.3f}-{one['ratio']['high']:.3f}"
        means = [f"{one[side]['mean']:.5g}" for side in ("first", "second")]
        rows.append((one["workload"], one["figure"], *means, f"{one['ratio']['mean']:.3f}", interval, one["verdict"]))
    options.print_table(("workload", "figure", "A", "B", "B by A", "95%", "B is"), rows)
    print(f"A: {found['reports'][0]}\nB: {found['reports'][1]}")
    for setting in found["settings"]:
        print(f"A and B: {setting}")
