"""The options that commands of `nanoinfer bench` share, and the words that explain workloads and figures."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from nanoinfer.cli.options import Device, Dtype, EnforceEager, Model, Quantization, parse_size
from nanoinfer.errors import InvalidValueError

if TYPE_CHECKING:
    from nanoinfer.bench.workloads import Workload

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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Named = Annotated[str | None, typer.Option("--workload", help="Some of A,B16,B64,C,D,E,F, with commas. Default: A,B16.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measured runs, after one to warm up.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its dtype and its device."""

    model: Model = None
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights instead of a model: gpt2, gpt2-medium, qwen2.5-0.5b or qwen3-0.6b."),
    ] = None
    dtype: Dtype = "auto"
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Workloads by name, or one of the user's own."""

    workload: Named = None
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests of a workload of your own, which the next options describe.")
    ] = None
    input_len: Annotated[str, typer.Option(help="Tokens per prompt: 128, or drawn from 16-256.")] = "128"
    output_len: Annotated[str, typer.Option(help="Tokens per answer, in the same form.")] = "128"
    request_rate: Annotated[float, typer.Option(help="Requests per second, at random times; inf is all at once.")] = math.inf
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 is off.")] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lengths and the arrival times.")] = 0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How throughput and latency run the workloads."""

    quantization: Quantization = None
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(parser=parse_size, metavar="SIZE", help="Memory for the KV cache: 1G or bytes. Default: what is needed."),
    ] = None
    enforce_eager: EnforceEager = False
    repeats: Repeats = 3
    compare: Annotated[
        str | None,
        typer.Option(
            help="Engines that run the same work, in turns, with commas: transformers, openvino, vllm, llama.cpp. Each of the "
            "last three may have a Python of its own: openvino=/environment/bin/python."
        ),
    ] = None


def pick_workloads(picked: WorkloadOptions) -> list["Workload"]:
    """The workloads by their names, or the one that is described. Raises: InvalidValueError."""
    from nanoinfer.bench import workloads

    if picked.num_prompts is None:
        if picked != WorkloadOptions(workload=picked.workload):
            raise InvalidValueError(
                "input_len, output_len, request_rate, temperature, top_k, top_p and seed describe a workload of your own; "
                "give num_prompts, too"
            )
        return workloads.named(picked.workload or DEFAULT_WORKLOADS)
    if picked.workload is not None:
        raise InvalidValueError("give workload, or num_prompts for one of your own, not both")
    return [
        workloads.described(
            num_prompts=picked.num_prompts,
            input_len=picked.input_len,
            output_len=picked.output_len,
            request_rate=picked.request_rate,
            sampling={"temperature": picked.temperature, "top_k": picked.top_k, "top_p": picked.top_p},
            seed=picked.seed,
        )
    ]
