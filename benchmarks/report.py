"""Write a dated entry for BENCHMARKS.md: machine, versions, transformers in turns, and the shares of the roofline's limit."""

import datetime
import gc
import importlib.metadata
import platform
import sys

import torch

from benchmarks import program
from benchmarks.compare import OURS, Comparison, compare
from benchmarks.peers.process import Peer
from nanoinfer.cli.bench import DEFAULT_WORKLOADS, ModelOptions, Named, Repeats
from nanoinfer.lab.bench import roofline, workloads
from nanoinfer.lab.bench.random_models import checkpoint_of
from nanoinfer.loading import loader


def entry(
    name: str,
    device: torch.device,
    machine: roofline.Machine,
    dtype: torch.dtype,
    phases: list[roofline.Phase],
    results: list[Comparison],
) -> str:
    """Write the entry in Markdown. name: of the model."""
    dtype_name = str(dtype).removeprefix("torch.")
    packages = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    lines = [
        f"## {name} in {dtype_name} on {_device_name(device)}, {datetime.date.today()}",
        "",
        f"Python {platform.python_version()}, {packages}. {machine.bandwidth / 1e9:,.0f} GB/s read, "
        f"{machine.gemm_rates[dtype] / 1e9:,.0f} GFLOP/s in {dtype_name}, measured in the same run.",
        "",
        "| workload | nanoinfer | transformers | ratio |",
        "|---|---|---|---|",
    ]
    for result in results:
        ours, theirs = result.show(OURS), result.show("transformers")
        lines.append(f"| {result.workload} | {ours} | {theirs} | {result.ratios['transformers']:.2f} |")
    lines += ["", "| step | limit, ms | measured, ms | share of the limit |", "|---|---|---|---|"]
    for phase in phases:
        least, measured = phase.least_s(machine, dtype), phase.measured_s
        lines.append(f"| {phase.name} | {least * 1e3:.2f} | {measured * 1e3:.2f} | {least / measured:.0%} |")
    return "\n".join(lines)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"


def main(*, measured: ModelOptions, workload: Named = None, repeats: Repeats = 1) -> None:
    """Print a comparison with transformers and the roofline, as a dated entry for BENCHMARKS.md."""
    with checkpoint_of(measured.model, measured.random_model, measured.dtype) as checkpoint:
        results = compare(
            checkpoint,
            workloads.named(workload or DEFAULT_WORKLOADS),
            repeats=repeats,
            peers=[Peer("transformers", sys.executable)],
            dtype=measured.dtype,
            device=measured.device,
        )
        gc.collect()  # frees the model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        machine, dtype, phases = roofline.run(checkpoint, dtype=measured.dtype, device=measured.device)
    name = measured.random_model or measured.model or "tiny-qwen3"
    print(entry(name, loader.resolve_device(measured.device), machine, dtype, phases, results))


app = program(main)
if __name__ == "__main__":
    app()
