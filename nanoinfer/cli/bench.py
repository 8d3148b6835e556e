"""`nanoinfer bench`: the options, and the tables for people. What is measured stands in the other files here."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nanoinfer.cli.options import Device, Dtype, Model, cli_errors
from nanoinfer.errors import InvalidValueError

if TYPE_CHECKING:
    from nanoinfer.bench.compare import Comparison

# The modules that measure are imported when they are asked for: torch and transformers take seconds.

DEFINITIONS = """\
TTFT, time to first token: from a request's arrival to its first token.

TPOT, time per output token, of one request: (last token - first token) / (tokens - 1).

ITL, inter-token latency: the times between a token and the next of its request, of all requests together.

Tokens per second: output tokens over the time from the first arrival to the last token, prefill included."""

WORKLOADS_HELP = """\
Workloads: A one stream (32 tokens in, 128 out); B16, B64 batches (64 in, 64 out); C prefill (1,023 in, 1 out); D 32 requests of
mixed lengths (16-256 in, 16-128 out); E 64 sampled streams (1 in, 128 out, top_k 40, top_p 0.9); F for a GPU, 256
requests (100-1,024 in and out). All but E are greedy."""

app = typer.Typer(help="What nanoinfer costs, beside what others cost.")

Shape = Annotated[
    str | None,
    typer.Option(help="Random weights instead of a model: gpt2, gpt2-medium, qwen2.5-0.5b or qwen3-0.6b."),
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Compile nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Named = Annotated[str | None, typer.Option("--workload", help="Some of A,B16,B64,C,D,E,F, with commas. Default: A,B16.")]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="A workload of your own: how many requests.")]
InputLen = Annotated[str, typer.Option(help="Its prompts' tokens: 128, or drawn from 16-256.")]
OutputLen = Annotated[str, typer.Option(help="Its answers' tokens, in the same way.")]
RequestRate = Annotated[float, typer.Option(help="Its requests per second, at random times; inf is all at once.")]
Temperature = Annotated[float, typer.Option(min=0, help="Its sampling; 0 is greedy.")]
TopK = Annotated[int, typer.Option(min=0, help="Its sampling; 0 is off.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Its sampling; 1 is off.")]
Seed = Annotated[int, typer.Option(min=0, help="Of its lengths and times.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs that count, after one to warm up.")]
Compare = Annotated[str | None, typer.Option(help="transformers: the same work through its generate, in turns.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Where prefill and decode stand under this machine's limits.")
    ] = False,
    model: Model = None,
    shape: Shape = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    enforce_eager: EnforceEager = False,
    plot: Annotated[Path, typer.Option(help="Where --roofline draws (PNG, needs matplotlib).")] = Path("roofline.png"),
    as_json: AsJson = False,
) -> None:
    if context.invoked_subcommand is not None:
        if roofline or (model, shape, dtype, device, enforce_eager, as_json) != (None, None, "auto", "auto", False, False):
            raise typer.BadParameter(f"give options after {context.invoked_subcommand}: those before it are --roofline's")
        return
    if not roofline:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    from nanoinfer.bench import compare
    from nanoinfer.bench import roofline as measured

    with cli_errors(), compare.checkpoint_of(model, shape, dtype) as checkpoint:
        machine, its_dtype, phases = measured.run(checkpoint, dtype=dtype, device=device, enforce_eager=enforce_eager)
        told = {
            "bandwidth_GB_per_s": machine.bandwidth / 1e9,
            "gemm_GFLOP_per_s": {str(d).removeprefix("torch."): rate / 1e9 for d, rate in machine.gemm_rates.items()},
            "dtype": str(its_dtype).removeprefix("torch."),
            "phases": [
                {
                    "name": phase.name,
                    "measured_ms": phase.measured_s * 1e3,
                    "least_ms": phase.least_s(machine, its_dtype) * 1e3,
                    "share_of_limit": phase.least_s(machine, its_dtype) / phase.measured_s,
                    "parts": [asdict(part) | {"least_ms": part.least_s(machine, its_dtype) * 1e3} for part in phase.parts],
                }
                for phase in phases
            ],
        }
        if as_json:
            print(json.dumps(told, indent=1))
        else:
            _show_roofline(told)
        try:
            measured.plot(machine, its_dtype, phases, plot)
            typer.echo(f"drawn: {plot}", err=True)
        except ImportError:
            typer.echo("nothing is drawn: matplotlib is not installed (pip install matplotlib)", err=True)


def _show_roofline(told: dict[str, Any]) -> None:
    rates = ", ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in told["gemm_GFLOP_per_s"].items())
    console = Console()
    console.print(f"memory {told['bandwidth_GB_per_s']:.1f} GB/s; matrix products {rates}; the model in {told['dtype']}")
    table = Table("phase", "part", "MB", "GFLOP", "at least ms", "measured ms", "share of the limit")
    for phase in told["phases"]:
        for part in phase["parts"]:
            numbers = (part["num_bytes"] / 1e6, part["num_operations"] / 1e9, part["least_ms"])
            table.add_row("", part["name"], *(f"{number:.2f}" for number in numbers))
        measured, share = f"{phase['measured_ms']:.2f}", f"{phase['share_of_limit']:.0%}"
        table.add_row(phase["name"], "all", "", "", f"{phase['least_ms']:.2f}", measured, share, end_section=True)
    console.print(table)


def _measuring(show: Callable[[list["Comparison"]], None], summary: str) -> Callable[..., None]:
    """One command for both: they run the same, and show other figures of it."""

    def command(
        model: Model = None,
        shape: Shape = None,
        workload: Named = None,
        num_prompts: NumPrompts = None,
        input_len: InputLen = "128",
        output_len: OutputLen = "128",
        request_rate: RequestRate = math.inf,
        temperature: Temperature = 0.0,
        top_k: TopK = 0,
        top_p: TopP = 1.0,
        seed: Seed = 0,
        dtype: Dtype = "auto",
        device: Device = "auto",
        quantization: Annotated[str | None, typer.Option(help="int8: weights in 8 bits, on a CPU.")] = None,
        kv_cache_memory: Annotated[int | None, typer.Option(help="Bytes for the KV cache. Default: what is needed.")] = None,
        enforce_eager: EnforceEager = False,
        repeats: Repeats = 3,
        compare: Compare = None,
        as_json: AsJson = False,
    ) -> None:
        with cli_errors():
            from nanoinfer.bench import compare as comparing
            from nanoinfer.bench import workloads

            if compare not in (None, "transformers"):
                raise InvalidValueError(f"compare must be transformers, got {compare!r}")
            if compare and math.isfinite(request_rate):
                raise InvalidValueError(
                    f"generate takes all requests at once; leave compare out, or request_rate={request_rate}"
                )
            own = (input_len, output_len, request_rate, temperature, top_k, top_p, seed)
            if num_prompts is None and own != ("128", "128", math.inf, 0.0, 0, 1.0, 0):
                raise InvalidValueError(
                    "input_len, output_len, request_rate, temperature, top_k, top_p and seed describe a workload of your own; "
                    "give num_prompts, too"
                )
            if num_prompts is None:
                picked = workloads.named(workload or "A,B16")
            elif workload is not None:
                raise InvalidValueError("give workload, or num_prompts for one of your own, not both")
            else:
                sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
                picked = [
                    workloads.described(
                        num_prompts=num_prompts,
                        input_len=input_len,
                        output_len=output_len,
                        request_rate=request_rate,
                        sampling=sampling,
                        seed=seed,
                    )
                ]
            with comparing.checkpoint_of(model, shape, dtype) as checkpoint:
                results = comparing.compare(
                    checkpoint,
                    picked,
                    shape=shape,
                    repeats=repeats,
                    with_transformers=compare is not None,
                    dtype=dtype,
                    device=device,
                    quantization=quantization,
                    kv_cache_memory=kv_cache_memory,
                    enforce_eager=enforce_eager,
                )
        if as_json:
            print(json.dumps([asdict(result) for result in results], indent=1))
        else:
            show(results)

    command.__doc__ = f"{summary}\n\n{WORKLOADS_HELP}\n\n{DEFINITIONS}"
    return command


def _show_throughput(results: list["Comparison"]) -> None:
    table = Table("workload", "requests", "output tok/s", "total tok/s", "TTFT ms")
    if results[0].theirs is not None:
        for heading in ("transformers", "times as fast", "bar"):
            table.add_column(heading)
    for result in results:
        ours, theirs = result.ours, result.theirs
        row = [result.workload, str(ours.num_requests), f"{ours.output_tokens_per_s:.1f}", f"{ours.total_tokens_per_s:.1f}"]
        row.append(f"{ours.ttft_ms.p50:.0f}")
        if theirs is not None and result.ratio is not None:
            by_ttft = ours.itl_ms is None
            row.append(f"{theirs.ttft_ms.p50:.0f} ms" if by_ttft else f"{theirs.output_tokens_per_s:.1f} tok/s")
            row.append(f"{result.ratio:.2f}")
            row.append(result.verdict)
        table.add_row(*row)
    Console().print(table)
    _show_memory(results[0])


def _show_latency(results: list["Comparison"]) -> None:
    table = Table("workload", "engine", "figure", "p50 ms", "p95 ms", "p99 ms")
    for result in results:
        for engine, figures in (("nanoinfer", result.ours), ("transformers", result.theirs)):
            if figures is None:
                continue
            for name, its in (("TTFT", figures.ttft_ms), ("TPOT", figures.tpot_ms), ("ITL", figures.itl_ms)):
                if its is not None:
                    table.add_row(result.workload, engine, name, f"{its.p50:.2f}", f"{its.p95:.2f}", f"{its.p99:.2f}")
    Console().print(table)
    _show_memory(results[0])


def _show_memory(result: "Comparison") -> None:
    weights, cache, in_use = (n / 1e6 for n in (result.num_weight_bytes, result.num_cache_bytes, result.memory_in_use))
    print(f"memory: weights {weights:.0f} MB, KV cache {cache:.0f} MB; in use {in_use:.0f} MB")


app.command("throughput")(_measuring(_show_throughput, "Tokens per second."))
app.command("latency")(_measuring(_show_latency, "TTFT, TPOT and ITL: their 50th, 95th and 99th percentiles."))


@app.command("sampler")
def sampler(
    repeats: Annotated[int, typer.Option(min=1, help="How many times each side of a case runs.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Drawing the tokens of 64 rows, beside transformers' warpers and multinomial; a minute or two."""
    from nanoinfer.bench import sampler as measured

    results = measured.run(repeats)
    if as_json:
        print(json.dumps([asdict(result) | {"ratio": result.ratio} for result in results], indent=1))
        return
    table = Table("case", "vocabulary", "nanoinfer ms", "other ms", "ratio", "bar", title=f"{measured.NUM_ROWS} rows")
    for result in results:
        bar = f"{result.bar}: {'reached' if result.is_reached else 'missed'}" if result.bar else ""
        numbers = (f"{result.ours_ms:.2f}", f"{result.theirs_ms:.2f}", f"{result.ratio:.1f}")
        table.add_row(result.name, str(result.vocab_size), *numbers, bar)
    Console().print(table)


@app.command("report")
def report(
    model: Model = None,
    shape: Shape = None,
    workload: Named = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Runs that count, after one to warm up.")] = 1,
) -> None:
    """Throughput beside transformers and the roofline, as a dated entry for BENCHMARKS.md."""
    import gc

    import torch

    from nanoinfer.bench import compare as comparing
    from nanoinfer.bench import roofline as measured
    from nanoinfer.bench import workloads
    from nanoinfer.bench.report import entry
    from nanoinfer.models import loader

    with cli_errors(), comparing.checkpoint_of(model, shape, dtype) as checkpoint:
        results = comparing.compare(
            checkpoint,
            workloads.named(workload or "A,B16"),
            shape=shape,
            repeats=repeats,
            with_transformers=True,
            dtype=dtype,
            device=device,
            quantization=None,
        )
        gc.collect()  # both models
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        machine, its_dtype, phases = measured.run(checkpoint, dtype=dtype, device=device)
        name = shape or model or "tiny-qwen3"
        print(entry(name, loader.resolve_device(device), machine, its_dtype, phases, results))
