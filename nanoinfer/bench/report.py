"""Write a dated entry for BENCHMARKS.md: machine, versions, workloads beside transformers, shares of the roofline's limit.

In: Comparisons and the roofline's phases. Out: Markdown.
"""

import datetime
import importlib.metadata
import platform

import torch

from nanoinfer.bench.compare import Comparison
from nanoinfer.bench.peers.process import TRANSFORMERS
from nanoinfer.bench.roofline import Machine, Phase


def entry(
    name: str, device: torch.device, machine: Machine, dtype: torch.dtype, phases: list[Phase], results: list[Comparison]
) -> str:
    """Write the entry. name: of the model or the shape."""
    dtype_name = str(dtype).removeprefix("torch.")
    packages = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    lines = [
        f"## {name} in {dtype_name} on {_device_name(device)}, {datetime.date.today()}",
        "",
        f"Python {platform.python_version()}, {packages}. {machine.bandwidth / 1e9:,.0f} GB/s read, "
        f"{machine.gemm_rates[dtype] / 1e9:,.0f} GFLOP/s in {dtype_name}, measured in the same run.",
        "",
        "| workload | nanoinfer | transformers | times as fast | bar |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        ratio = "" if result.theirs is None else f"{result.ratios[TRANSFORMERS.name]:.2f}"
        theirs = "" if result.theirs is None else _figure(result, of_transformers=True)
        lines.append(f"| {result.workload} | {_figure(result)} | {theirs} | {ratio} | {result.verdict} |")
    lines += ["", "| step | at least ms | measured ms | share of the limit |", "|---|---|---|---|"]
    for phase in phases:
        least, measured = phase.least_s(machine, dtype), phase.measured_s
        lines.append(f"| {phase.name} | {least * 1e3:.2f} | {measured * 1e3:.2f} | {least / measured:.0%} |")
    return "\n".join(lines)


def _figure(result: Comparison, *, of_transformers: bool = False) -> str:
    figures = result.theirs if of_transformers else result.ours
    assert figures is not None
    return f"{figures.ttft_ms.p50:.0f} ms" if result.ours.itl_ms is None else f"{figures.output_tokens_per_s:,.0f} tok/s"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
