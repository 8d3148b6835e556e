"""`nanoinfer bench`: its commands and its tables. The files of bench/ measure."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nanoinfer.cli.bench_options import (
    DEFAULT_WORKLOADS,
    DEFINITIONS,
    SERVE_DEFINITIONS,
    WORKLOADS_HELP,
    AsJson,
    ModelOptions,
    Named,
    Repeats,
    RunOptions,
    WorkloadOptions,
    pick_workloads,
)
from nanoinfer.cli.options import EnforceEager, expand_options, new_table
from nanoinfer.errors import InvalidValueError

if TYPE_CHECKING:
    from nanoinfer.bench.compare import Comparison
    from nanoinfer.bench.serve import ServeFigures

# The functions import the modules that measure: torch and transformers take seconds to import, and --help needs neither.

app = typer.Typer(help="Measure nanoinfer, also beside transformers, or a server.")


@app.callback(invoke_without_command=True)
@expand_options
def bench(
    *,
    context: typer.Context,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Compare prefill and decode with this machine's limits.")
    ] = False,
    measured: ModelOptions,
    enforce_eager: EnforceEager = False,
    plot: Annotated[Path, typer.Option(help="Path of --roofline's plot (PNG, requires matplotlib).")] = Path("roofline.png"),
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        if roofline or enforce_eager or as_json or measured != ModelOptions():
            raise typer.BadParameter(f"give options after {context.invoked_subcommand}: those before it are --roofline's")
        return
    if not roofline:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    from nanoinfer.bench import compare
    from nanoinfer.bench import roofline as measurement

    with compare.checkpoint_of(measured.model, measured.shape, measured.dtype) as checkpoint:
        machine, dtype, phases = measurement.run(
            checkpoint, dtype=measured.dtype, device=measured.device, enforce_eager=enforce_eager
        )
        report = {
            "bandwidth_GB_per_s": machine.bandwidth / 1e9,
            "gemm_GFLOP_per_s": {str(d).removeprefix("torch."): rate / 1e9 for d, rate in machine.gemm_rates.items()},
            "dtype": str(dtype).removeprefix("torch."),
            "phases": [
                {
                    "name": phase.name,
                    "measured_ms": phase.measured_s * 1e3,
                    "least_ms": phase.least_s(machine, dtype) * 1e3,
                    "share_of_limit": phase.least_s(machine, dtype) / phase.measured_s,
                    "parts": [asdict(part) | {"least_ms": part.least_s(machine, dtype) * 1e3} for part in phase.parts],
                }
                for phase in phases
            ],
        }
        if as_json:
            print(json.dumps(report, indent=1))
        else:
            _show_roofline(report)
        try:
            measurement.plot(machine, dtype, phases, plot)
            typer.echo(f"plotted: {plot}", err=True)
        except ImportError:
            typer.echo("no plot: matplotlib is not installed (pip install matplotlib)", err=True)


def _show_roofline(report: dict[str, Any]) -> None:
    rates = ", ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in report["gemm_GFLOP_per_s"].items())
    console = Console()
    console.print(f"memory {report['bandwidth_GB_per_s']:.1f} GB/s; matrix products {rates}; the model in {report['dtype']}")
    table = new_table("phase", "part", "MB", "GFLOP", "at least ms", "measured ms", "share of the limit")
    for phase in report["phases"]:
        for part in phase["parts"]:
            numbers = (part["num_bytes"] / 1e6, part["num_operations"] / 1e9, part["least_ms"])
            table.add_row("", part["name"], *(f"{number:.2f}" for number in numbers))
        measured, share = f"{phase['measured_ms']:.2f}", f"{phase['share_of_limit']:.0%}"
        table.add_row(phase["name"], "all", "", "", f"{phase['least_ms']:.2f}", measured, share, end_section=True)
    console.print(table)


@app.command(help=f"Measure tokens per second.\n\n{WORKLOADS_HELP}\n\n{DEFINITIONS}")
@expand_options
def throughput(*, measured: ModelOptions, picked: WorkloadOptions, run: RunOptions, as_json: AsJson = False) -> None:
    _print(_compare(measured, picked, run), _show_throughput, as_json)


@app.command(help=f"Measure TTFT, TPOT and ITL: their 50th, 95th and 99th percentiles.\n\n{WORKLOADS_HELP}\n\n{DEFINITIONS}")
@expand_options
def latency(*, measured: ModelOptions, picked: WorkloadOptions, run: RunOptions, as_json: AsJson = False) -> None:
    if run.compare not in (None, "transformers"):
        raise InvalidValueError(
            f"latency compares with transformers only, got {run.compare!r}; throughput compares with others"
        )
    _print(_compare(measured, picked, run), _show_latency, as_json)


def _compare(measured: ModelOptions, picked: WorkloadOptions, run: RunOptions) -> list["Comparison"]:
    """Run the workloads through nanoinfer and the peers of `run`."""
    from nanoinfer.bench import compare
    from nanoinfer.bench.peers.process import parse_peers

    if run.compare and math.isfinite(picked.request_rate):
        raise InvalidValueError(
            f"engines to compare with take all requests at once; leave compare out, or request_rate={picked.request_rate}"
        )
    workloads = pick_workloads(picked)
    peers = parse_peers(run.compare) if run.compare else []
    with compare.checkpoint_of(measured.model, measured.shape, measured.dtype) as checkpoint:
        return compare.compare(
            checkpoint,
            workloads,
            shape=measured.shape,
            repeats=run.repeats,
            peers=peers,
            dtype=measured.dtype,
            device=measured.device,
            quantization=run.quantization,
            kv_cache_memory=run.kv_cache_memory,
            enforce_eager=run.enforce_eager,
        )


def _print(results: list["Comparison"], show: Callable[[list["Comparison"]], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        show(results)


def _show_throughput(results: list["Comparison"]) -> None:
    table = new_table("workload", "requests", "output tok/s", "total tok/s", "TTFT ms")
    for result in results:
        ours = result.ours
        speeds = (f"{ours.output_tokens_per_s:.1f}", f"{ours.total_tokens_per_s:.0f}", f"{ours.ttft_ms.p50:.0f}")
        table.add_row(result.workload, str(ours.num_requests), *speeds)
    Console().print(table)
    if results[0].best is not None:
        _show_peers(results)
    _show_memory(results[0])


def _show_peers(results: list["Comparison"]) -> None:
    table = new_table("workload", "engine", "output", "ratio", "bar")
    for result in results:
        for name, speed in result.speeds.items():
            output = f"{1e3 / speed:.0f} ms" if result.ours.num_output_tokens == 1 else f"{speed:.1f} tok/s"
            ratio = f"{result.ratios[name]:.2f}" if name in result.ratios else ""
            table.add_row(
                result.workload,
                f"{name}, best" if name == result.best and len(result.ratios) > 1 else name,
                output,
                ratio,
                result.verdict if name == "transformers" else "",
                end_section=name == list(result.speeds)[-1],
            )
    Console().print(table)
    print("ratio: nanoinfer's speed divided by the engine's. best: the fastest peer.")


def _show_latency(results: list["Comparison"]) -> None:
    table = new_table("workload", "engine", "figure", "p50 ms", "p95 ms", "p99 ms")
    for result in results:
        for engine, figures in (("nanoinfer", result.ours), ("transformers", result.theirs)):
            if figures is None:
                continue
            for name, percentiles in (("TTFT", figures.ttft_ms), ("TPOT", figures.tpot_ms), ("ITL", figures.itl_ms)):
                if percentiles is not None:
                    numbers = (f"{one:.2f}" for one in (percentiles.p50, percentiles.p95, percentiles.p99))
                    table.add_row(result.workload, engine, name, *numbers)
    Console().print(table)
    _show_memory(results[0])


def _show_memory(result: "Comparison") -> None:
    weights, cache, in_use = (n / 1e6 for n in (result.num_weight_bytes, result.num_cache_bytes, result.memory_in_use))
    print(f"memory: weights {weights:.0f} MB, KV cache {cache:.0f} MB; in use {in_use:.0f} MB")


@app.command(help=f"Measure an OpenAI-compatible server from outside.\n\n{WORKLOADS_HELP}\n\n{SERVE_DEFINITIONS}")
@expand_options
def serve(
    *,
    url: Annotated[str | None, typer.Option(help="The server, such as http://127.0.0.1:8000. Required.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key. Default: OPENAI_API_KEY of the environment.")] = None,
    picked: WorkloadOptions,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests in flight. Default: no limit.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send words to /chat/completions, not ids to /completions.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length. OpenAI's servers refuse the field.")] = True,
    goodput: Annotated[
        list[str] | None, typer.Option(help='Limits in ms: "ttft:200 tpot:50 e2el:2000", or some of them.')
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds without a byte after which a request has failed.")] = 600,
    as_json: AsJson = False,
) -> None:
    if url is None:
        raise InvalidValueError("give the --url of a server; `nanoinfer serve` starts one at http://127.0.0.1:8000")
    from nanoinfer.bench import serve as measurement
    from nanoinfer.server.client import Client

    limits = measurement.parse_goodput(goodput or [])
    workloads = pick_workloads(picked)
    client = Client(url, api_key=api_key or os.environ.get("OPENAI_API_KEY"), timeout=timeout)
    target = measurement.Target(
        client=client,
        model=model or client.first_model(),
        is_chat=chat,
        ignore_eos=ignore_eos,
        max_concurrency=max_concurrency,
    )
    results = [measurement.run(target, workload, limits) for workload in workloads]
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        for result in results:
            _show_serve(result)
    if any(result.num_failed for result in results):
        raise typer.Exit(1)


def _show_serve(result: "ServeFigures") -> None:
    table = new_table("figure", "mean ms", "p50 ms", "p95 ms", "p99 ms", title=f"workload {result.workload}")
    for name in ("ttft", "tpot", "itl", "e2el"):
        if (percentiles := getattr(result, f"{name}_ms")) is not None:
            table.add_row(name.upper(), *(f"{value:.2f}" for value in asdict(percentiles).values()))
    Console().print(table)
    print(f"{result.num_requests} requests in {result.duration_s:.2f} s, {result.num_failed} failed")
    print(f"{result.requests_per_s:.2f} requests/s", end="")
    if result.goodput_requests_per_s is not None:
        print(f", goodput {result.goodput_requests_per_s:.2f} requests/s", end="")
    print(f", {result.output_tokens_per_s:.1f} output tokens/s, {result.total_tokens_per_s:.1f} with the prompts'")
    print(f"{result.num_output_tokens} output tokens, {result.tokens_per_chunk:.2f} per chunk")
    per_token = result.client_cpu_s / max(result.num_output_tokens, 1)
    share = result.client_cpu_s / result.duration_s if result.duration_s else 0.0
    print(f"this client took {share:.0%} of one core, {per_token * 1e6:.0f} us per token")
    for message, count in result.failures.items():
        print(f"failed {count} times: {message}")


@app.command("sampler")
def sampler(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side of a case.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Time the drawing of the tokens of 64 rows, beside transformers' warpers and multinomial. It takes a minute or two."""
    from nanoinfer.bench import sampler as measured

    results = measured.run(repeats)
    if as_json:
        print(json.dumps([asdict(result) | {"ratio": result.ratio} for result in results], indent=1))
        return
    table = new_table("case", "vocabulary", "nanoinfer ms", "other ms", "ratio", "bar", title=f"{measured.NUM_ROWS} rows")
    for result in results:
        bar = f"{result.bar}: {'reached' if result.is_reached else 'missed'}" if result.bar else ""
        numbers = (f"{result.ours_ms:.2f}", f"{result.theirs_ms:.2f}", f"{result.ratio:.1f}")
        table.add_row(result.name, str(result.vocab_size), *numbers, bar)
    Console().print(table)


@app.command("speculation")
@expand_options
def speculation(
    *,
    measured: ModelOptions,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=64, help="The most tokens of a draft.")] = 8,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Generate with n-gram drafts and without, in turns: what they win where text repeats itself, and cost elsewhere."""
    from nanoinfer.bench import compare
    from nanoinfer.bench import speculation as measurement
    from nanoinfer.llm import LLM

    config = {"method": "ngram", "num_speculative_tokens": num_speculative_tokens}
    with compare.checkpoint_of(measured.model, measured.shape, measured.dtype) as checkpoint:
        llm = LLM(checkpoint, dtype=measured.dtype, device=measured.device, speculative_config=config, seed=0)
        results = measurement.run(llm, repeats)
    if as_json:
        print(json.dumps([asdict(result) | {"ratio": result.ratio} for result in results], indent=1))
        return
    table = new_table("case", "plain", "drafts", "ratio", "bar", "accepted", "us", title="output tokens per second")
    for result in results:
        bar = "" if result.bar is None else f">= {result.bar} {'reached' if result.ratio >= result.bar else 'missed'}"
        speeds = (f"{result.plain:.1f}", f"{result.drafting:.1f}", f"{result.ratio:.2f}")
        table.add_row(result.name, *speeds, bar, f"{result.accepted} of {result.drafted}", f"{result.propose_us:.0f}")
    Console().print(table)
    print("accepted: draft tokens. us: microseconds of a proposal for one sequence.")


@app.command("report")
@expand_options
def report(
    *,
    measured: ModelOptions,
    workload: Named = None,
    repeats: Repeats = 1,
) -> None:
    """Print throughput beside transformers and the roofline, as a dated entry for BENCHMARKS.md."""
    import gc

    import torch

    from nanoinfer.bench import compare, roofline, workloads
    from nanoinfer.bench.peers.process import TRANSFORMERS
    from nanoinfer.bench.report import entry
    from nanoinfer.models import loader

    with compare.checkpoint_of(measured.model, measured.shape, measured.dtype) as checkpoint:
        results = compare.compare(
            checkpoint,
            workloads.named(workload or DEFAULT_WORKLOADS),
            shape=measured.shape,
            repeats=repeats,
            peers=[TRANSFORMERS],
            dtype=measured.dtype,
            device=measured.device,
            quantization=None,
        )
        gc.collect()  # frees both models
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        machine, dtype, phases = roofline.run(checkpoint, dtype=measured.dtype, device=measured.device)
        name = measured.shape or measured.model or "tiny-qwen3"
        print(entry(name, loader.resolve_device(measured.device), machine, dtype, phases, results))
