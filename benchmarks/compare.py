"""Run workloads through nanoinfer and other engines, in interleaved runs, and compare their speeds.

In: a checkpoint or a random model, workloads, engines. Out: a Comparison for each workload, and lines of results.jsonl.
"""

import datetime
import json
import math
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import program
from benchmarks.baselines.process import ENGINES, Baseline, BaselineProcess, parse_baselines
from benchmarks.results import LEAST_RUNS, RELEASE
from nanoinfer.cli.options import AsJson, EngineOptions, check_writable, llm_arguments, print_table
from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.llm import LLM
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.system import environment
from nanoinfer_lab.bench.offline import load, run_workload
from nanoinfer_lab.bench.random_models import checkpoint_of
from nanoinfer_lab.bench.timing import figures
from nanoinfer_lab.bench.workloads import Workload
from nanoinfer_lab.cli.bench import RandomModel, Repeats, WorkloadOptions, pick_workloads

OURS = "nanoinfer"
NAMES = {"gpt2": "GPT-2", "qwen3-0.6b": "Qwen3-0.6B"}  # of random models, in BENCHMARKS.md
TEMPERATURE = 0.6  # of nano-vllm's own benchmark


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload.

    Attributes:
        is_prefill: One output token per request, so the figure is a time.
        runs: The output tokens per second of each run of each engine, by name, nanoinfer first.
        engines: The other engines' names with their versions, by name.
    """

    workload: str
    is_prefill: bool
    runs: dict[str, list[float]]
    engines: dict[str, str] = field(default_factory=dict)

    @property
    def speeds(self) -> dict[str, float]:
        """The median output tokens per second of each engine."""
        return {name: statistics.median(runs) for name, runs in self.runs.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """Nanoinfer's speed divided by that of each other engine."""
        return {name: self.speeds[OURS] / speed for name, speed in self.speeds.items() if name != OURS}

    def range_of(self, name: str) -> list[float]:
        """The median, the lowest and the highest figure of an engine, in milliseconds or tokens per second, to 4 digits."""
        runs = [1e3 / run if self.is_prefill else run for run in self.runs[name]]
        found = [float(f"{value:.4g}") for value in (statistics.median(runs), min(runs), max(runs))]
        return [round(value) if value >= 100 else value for value in found]

    def show(self, name: str) -> str:
        """The figure of an engine with its unit."""
        return f"{1e3 / self.speeds[name]:,.0f} ms" if self.is_prefill else f"{self.speeds[name]:,.0f} tok/s"


def compare(
    model: str | None, workloads: list[Workload], *, repeats: int, baselines: list[Baseline], **engine: Any
) -> Iterator[Comparison]:
    """Run each workload once to warm up, then `repeats` times, in every engine, and yield its comparison.

    If an engine samples with a temperature alone, all engines do, and the workload's name says so.

    Args:
        model: A name or a folder, as LLM takes it.
        workloads: Run in this order.
        repeats: Measured runs of each workload, >= 1.
        baselines: The other engines.
        engine: Arguments of LLM. dtype and device are required.

    Raises:
        InvalidValueError: A workload is too long, or a baseline does not support the device or the dtype.
        NanoinferError: A baseline has failed.
    """
    if any(ENGINES[baseline.name].is_temperature_only for baseline in baselines):
        workloads = [_with_temperature_only(workload) for workload in workloads]
    llm = load(model, workloads, **engine)
    info = llm.info
    for workload in workloads:  # generate pads to the longest prompt and the longest answer
        needed, limit = max(workload.input_lens) + max(workload.output_lens), llm.engine.max_model_len
        if needed > limit and any(baseline.name == "transformers" for baseline in baselines):
            raise InvalidValueError(
                f"workload {workload.name} needs {needed} tokens at a time, but max_model_len is {limit}; pick a shorter one"
            )
    for baseline in baselines:
        required = ENGINES[baseline.name]
        if required.device not in (None, torch.device(info.device).type) or info.dtype not in required.dtypes:
            raise InvalidValueError(
                f"{baseline.name} requires device={required.device} and dtype {' or '.join(required.dtypes)}, got "
                f"{info.device} and {info.dtype}; leave it out of engines"
            )
    for workload in workloads:
        run_workload(llm, workload, 0)
    with ExitStack() as stack:
        processes = []
        for baseline in baselines:
            process = BaselineProcess(
                baseline,
                Checkpoint.open(model, engine.get("revision")).path,
                dtype=info.dtype,
                device=info.device,
                num_threads=torch.get_num_threads(),
                max_model_len=max(max(workload.num_tokens) for workload in workloads),
                max_num_seqs=min(SchedulerConfig.max_num_seqs, max(len(workload.input_lens) for workload in workloads)),
                num_cache_tokens=info.num_blocks * info.block_size,
            )
            processes.append(stack.enter_context(closing(process)))
            print(f"comparing with {process.engine}", file=sys.stderr)
        for workload in workloads:
            yield _interleave(workload, repeats, llm, processes)


def _with_temperature_only(workload: Workload) -> Workload:
    """Leave top_k and top_p out, and sample instead of greedy decoding."""
    temperature = workload.sampling["temperature"] or TEMPERATURE
    return replace(workload, name=f"{workload.name}, temperature {temperature}", sampling={"temperature": temperature})


def _interleave(workload: Workload, repeats: int, llm: LLM, processes: list[BaselineProcess]) -> Comparison:
    """Run a workload `repeats` times in every engine. The baselines run it once before, to warm up."""
    vocab_size = llm.engine.executor.info.vocab_size
    runs: dict[str, list[float]] = {name: [] for name in (OURS, *(process.baseline.name for process in processes))}
    for process in processes:
        process.run(workload, workload.prompts(vocab_size, 0))
    for run in range(1, repeats + 1):
        runs[OURS].append(figures(run_workload(llm, workload, run)).output_tokens_per_s)
        for process in processes:
            seconds = process.run(workload, workload.prompts(vocab_size, run))
            runs[process.baseline.name].append(sum(workload.output_lens) / seconds)
    engines = {process.baseline.name: process.engine for process in processes}
    return Comparison(workload.name, sum(workload.output_lens) == 1, runs, engines)


def result_lines(results: list[Comparison], machine: str, model: str, dtype: str) -> list[dict[str, Any]]:
    """Make a line of results.jsonl for each workload and other engine.

    Args:
        results: What was compared.
        machine: Its name in BENCHMARKS.md.
        model: The model's name in BENCHMARKS.md.
        dtype: The dtype that was computed in.
    """
    versions = environment.versions()
    about = {"kind": "speed", "machine": machine, "date": str(datetime.date.today()), "commit": versions.pop("commit", None)}
    about |= {"release": RELEASE, "model": model, "dtype": dtype}
    return [
        about
        | {"workload": result.workload.partition(", temperature")[0], "baseline": engine}
        | {"unit": "ms" if result.is_prefill else "tokens/s"}
        | {"runs": len(result.runs[name]), "nanoinfer": result.range_of(OURS), "other": result.range_of(name)}
        | {"note": "a temperature alone" if ", temperature" in result.workload else "", "versions": versions}
        for result in results
        for name, engine in result.engines.items()
    ]


def main(
    *,
    picked: WorkloadOptions,
    engine: EngineOptions,
    random_model: RandomModel = None,
    repeats: Repeats = 3,
    engines: Annotated[
        str,
        typer.Option(
            help="transformers, openvino, vllm, llama.cpp, nano-vllm, with commas. Each may have its Python: vllm=PYTHON."
        ),
    ] = "transformers",
    results_file: Annotated[
        Path | None, typer.Option("--results", help="Append the rows, with their ranges: benchmarks/results.jsonl.")
    ] = None,
    machine: Annotated[str, typer.Option(help="The machine's name in BENCHMARKS.md, for --results.")] = "",
    as_json: AsJson = False,
) -> None:
    """Compare tokens per second with other engines. `nanoinfer bench throughput --help-all` describes the workloads."""
    if math.isfinite(picked.request_rate):
        raise InvalidValueError(f"other engines take all requests at once; leave out request_rate={picked.request_rate}")
    if results_file and (repeats < LEAST_RUNS or not machine or engine.dtype == "auto"):
        raise InvalidValueError(
            f"a row of results needs repeats >= {LEAST_RUNS}, a machine and a dtype, got {repeats}, {machine!r} and "
            f'{engine.dtype}; write --repeats {LEAST_RUNS} --machine "Zen 4" --dtype bfloat16'
        )
    if results_file:
        check_writable(results_file)
    workloads, baselines = pick_workloads(picked), parse_baselines(engines)
    with checkpoint_of(engine.model, random_model, engine.dtype) as checkpoint:
        results = list(
            compare(workloads=workloads, repeats=repeats, baselines=baselines, **llm_arguments(engine, model=checkpoint))
        )
    if results_file:
        name = NAMES.get(random_model or "", random_model or engine.model or "tiny-qwen3")
        with results_file.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in result_lines(results, machine, name, engine.dtype))
    if as_json:
        print(json.dumps([asdict(result) | {"speeds": result.speeds, "ratios": result.ratios} for result in results], indent=1))
        return
    rows: list[list[str]] = []
    for result in results:
        for name in result.speeds:
            ratio = f"{result.ratios[name]:.2f}" if name in result.ratios else ""
            rows.append([result.workload, name, result.show(name), ratio])
        rows.append([])
    print_table(("workload", "engine", "output", "ratio"), rows)
    print("ratio: nanoinfer's speed divided by the engine's")


app = program(main)
if __name__ == "__main__":
    app()
