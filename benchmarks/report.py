"""Write a dated entry for BENCHMARKS.md: machine, versions, transformers interleaved, and the shares of the roofline's
limit."""

import datetime
import gc
import importlib.metadata
import platform
import sys

import torch

from benchmarks import program
from benchmarks.baselines.process import Baseline
from benchmarks.compare import OURS, Comparison, compare
from nanoinfer.loading import devices, loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer_lab.bench import offline, roofline, workloads
from nanoinfer_lab.bench.random_models import checkpoint_of
from nanoinfer_lab.bench.timing import figures
from nanoinfer_lab.cli.bench import DEFAULT_WORKLOADS, ModelOptions, Named, Repeats

LARGEST_BATCH = 2**17  # tokens that transformers may pad a workload to. F would be 2**19, whose keys exceed most GPUs' memory


def entry(
    name: str,
    device: torch.device,
    machine: roofline.Machine,
    dtype: torch.dtype,
    limits: list[tuple[str, float, float]],
    results: list[Comparison],
) -> str:
    """Write the entry in Markdown.

    Args:
        name: The model's.
        limits: What was measured, the least seconds that the roofline allows, and the seconds that it took.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    packages = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    lines = [
        f"### {name} in {dtype_name} on {_device_name(device)}, {datetime.date.today()}",
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
    lines += ["", "| step, or all steps of a workload | limit, ms | measured, ms | share of the limit |", "|---|---|---|---|"]
    for what, least, measured in limits:
        lines.append(f"| {what} | {least * 1e3:,.2f} | {measured * 1e3:,.2f} | {least / measured:.0%} |")
    return "\n".join(lines)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"


def _free_memory() -> None:
    """Free the last model, which its cycles keep."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(*, measured: ModelOptions, workload: Named = None, repeats: Repeats = 1) -> None:
    """Print a comparison with transformers and the roofline, as a dated entry for BENCHMARKS.md.

    A workload too large for a padded batch is compared with the roofline alone.
    """
    chosen = workloads.named(workload or DEFAULT_WORKLOADS)
    paddable = [one for one in chosen if len(one.input_lens) * (max(one.input_lens) + max(one.output_lens)) <= LARGEST_BATCH]
    engine = {"dtype": measured.dtype, "device": measured.device}
    with checkpoint_of(measured.model, measured.random_model, measured.dtype) as checkpoint:
        baselines = [Baseline("transformers", sys.executable)]
        results = list(compare(checkpoint, paddable, repeats=repeats, baselines=baselines, **engine))
        _free_memory()
        machine, dtype, phases = roofline.run(checkpoint, **engine)
        limits = [(phase.name, phase.least_s(machine, dtype), phase.measured_s) for phase in phases]
        model, _ = loader.on_meta(Checkpoint.open(checkpoint))
        for one in chosen:
            if one in paddable:
                continue
            _free_memory()
            llm = offline.load(checkpoint, [one], **engine)
            _, timings = (offline.run_workload(llm, one, run) for run in range(2))
            found = figures(timings)
            least = roofline.least_s_of_run(timings, machine, model, dtype)
            limits.append((f"{one.name}, {found.output_tokens_per_s:,.0f} tok/s", least, found.duration_s))
    name = measured.random_model or measured.model or "tiny-qwen3"
    print(entry(name, devices.resolve_device(measured.device), machine, dtype, limits, results))


app = program(main)
if __name__ == "__main__":
    app()
