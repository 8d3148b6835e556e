"""Run workloads through nanoinfer and, in turns, through other engines, and compare their speeds.

In: a checkpoint or a random model, workloads, engines. Out: a Comparison for each workload.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
import typer

from benchmarks import program
from benchmarks.peers.process import ENGINES, Peer, PeerProcess, parse_peers
from nanoinfer.cli.bench import RandomModel, Repeats, WorkloadOptions, pick_workloads
from nanoinfer.cli.options import AsJson, EngineOptions, llm_arguments, print_table
from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.lab.bench.offline import load, run_workload
from nanoinfer.lab.bench.random_models import checkpoint_of
from nanoinfer.lab.bench.timing import figures
from nanoinfer.lab.bench.workloads import Workload
from nanoinfer.llm import LLM
from nanoinfer.loading.checkpoint import Checkpoint

OURS = "nanoinfer"
TEMPERATURE = 0.6  # of nano-vllm's own benchmark


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload. speeds: the median output tokens per second of each engine, by name, nanoinfer first."""

    workload: str
    is_prefill: bool  # one output token per request: the figure is a time
    speeds: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Nanoinfer's speed divided by that of each other engine."""
        return {name: self.speeds[OURS] / speed for name, speed in self.speeds.items() if name != OURS}

    def show(self, name: str) -> str:
        """The figure of an engine with its unit."""
        return f"{1e3 / self.speeds[name]:,.0f} ms" if self.is_prefill else f"{self.speeds[name]:,.0f} tok/s"


def compare(
    model: str | None, workloads: list[Workload], *, repeats: int, peers: list[Peer], **engine: Any
) -> Iterator[Comparison]:
    """Run each workload once to warm up, then `repeats` times, in every engine, and yield its comparison.

    If an engine samples with a temperature alone, all engines do, and the workload's name says so.

    Args:
        model: A name or a folder, as LLM takes it.
        workloads: Run in this order.
        repeats: Measured runs of each workload, >= 1.
        peers: The other engines.
        engine: Arguments of LLM. dtype and device are required.

    Raises:
        InvalidValueError: A workload is too long, or a peer does not support the device or the dtype.
        NanoinferError: A peer has failed.
    """
    if any(ENGINES[peer.name].is_temperature_only for peer in peers):
        workloads = [_with_temperature_only(workload) for workload in workloads]
    llm = load(model, workloads, **engine)
    info = llm.info
    for workload in workloads:  # generate pads to the longest prompt and the longest answer
        needed, limit = max(workload.input_lens) + max(workload.output_lens), llm.engine.max_model_len
        if needed > limit and any(peer.name == "transformers" for peer in peers):
            raise InvalidValueError(
                f"workload {workload.name} needs {needed} tokens at a time, but max_model_len is {limit}; pick a shorter one"
            )
    for peer in peers:
        required = ENGINES[peer.name]
        if required.device not in (None, torch.device(info.device).type) or info.dtype not in required.dtypes:
            raise InvalidValueError(
                f"{peer.name} requires device={required.device} and dtype {' or '.join(required.dtypes)}, got "
                f"{info.device} and {info.dtype}; leave it out of engines"
            )
    for workload in workloads:
        run_workload(llm, workload, 0)
    with ExitStack() as stack:
        processes = []
        for peer in peers:
            process = PeerProcess(
                peer,
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
            yield _take_turns(workload, repeats, llm, processes)


def _with_temperature_only(workload: Workload) -> Workload:
    """Leave top_k and top_p out, and sample instead of greedy decoding."""
    temperature = workload.sampling["temperature"] or TEMPERATURE
    return replace(workload, name=f"{workload.name}, temperature {temperature}", sampling={"temperature": temperature})


def _take_turns(workload: Workload, repeats: int, llm: LLM, processes: list[PeerProcess]) -> Comparison:
    """Run a workload `repeats` times in every engine. The peers run it once before, to warm up."""
    vocab_size = llm.engine.executor.info.vocab_size
    speeds: dict[str, list[float]] = {name: [] for name in (OURS, *(process.peer.name for process in processes))}
    for process in processes:
        process.run(workload, workload.prompts(vocab_size, 0))
    for run in range(1, repeats + 1):
        speeds[OURS].append(figures(run_workload(llm, workload, run)).output_tokens_per_s)
        for process in processes:
            seconds = process.run(workload, workload.prompts(vocab_size, run))
            speeds[process.peer.name].append(sum(workload.output_lens) / seconds)
    medians = {name: statistics.median(runs) for name, runs in speeds.items()}
    return Comparison(workload.name, sum(workload.output_lens) == 1, medians)


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
    as_json: AsJson = False,
) -> None:
    """Compare tokens per second with other engines. `nanoinfer bench throughput --help` describes the workloads."""
    if math.isfinite(picked.request_rate):
        raise InvalidValueError(f"other engines take all requests at once; leave out request_rate={picked.request_rate}")
    workloads, peers = pick_workloads(picked), parse_peers(engines)
    with checkpoint_of(engine.model, random_model, engine.dtype) as checkpoint:
        arguments = llm_arguments(engine, model=checkpoint)
        results = list(compare(workloads=workloads, repeats=repeats, peers=peers, **arguments))
    if as_json:
        print(json.dumps([asdict(result) | {"ratios": result.ratios} for result in results], indent=1))
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
