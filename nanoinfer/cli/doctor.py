"""`nanoinfer doctor`: print what a bug report needs, what the engine will use, and whether each attention backend is right.

A backend is right if its output for a small step with random numbers is that of the reference backend in fp32.
"""

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE

import nanoinfer
from nanoinfer.attention.base import BACKENDS, AttentionBackend, find_backend, select_backend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.build import make_runtime
from nanoinfer.cli.bits import SAME, compare
from nanoinfer.cli.options import print_table
from nanoinfer.config import EngineConfig
from nanoinfer.errors import UnsupportedError, first_line
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.memory import describe_graphs, memory_for_cache, size_cache
from nanoinfer.fast.batch_independence import scratch_sequences
from nanoinfer.fast.cpu import native, packs
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.native import cache_folder, find_compiler, find_target
from nanoinfer.features.disk_cache import block_files
from nanoinfer.load import load
from nanoinfer.loading.devices import cpu_has_fast_bf16, default_dtype
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan
from nanoinfer.system import environment
from nanoinfer.system.process import available_cpu_memory, cpu_quota, limit_threads

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 64, 4, 2
# (cached tokens, new tokens) of each sequence of the step: two decodes, a chunk after a prefix, a whole prompt
LENGTHS = ((40, 1), (300, 1), (70, 30), (0, 90))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison of a backend with the reference."""

    backend: str
    difference: float | None  # the largest absolute difference. None: the backend was not run, or raised
    result: str  # the text to print
    failed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The findings, as names and values to print."""

    machine: dict[str, str]
    engine: dict[str, str]
    checks: list[Check]
    model: dict[str, str] | None = None  # which modules were compiled
    bits: dict[str, str] | None = None  # of the bundled models' answers (bits.py)

    @property
    def has_other_bits(self) -> bool:
        return self.bits is not None and set(self.bits.values()) != {SAME}


def examine(
    model: str | None = None, *, with_model: bool = False, with_bits: bool = False, prefix_cache_dir: str | None = None
) -> Report:
    """Examine the machine, and run every backend that can run on it. With a model, compile it. With bits, compare them.

    prefix_cache_dir: a folder of prefixes whose size is listed. Raises: the errors of loading.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = default_dtype(torch.bfloat16, device)
    checks = [_check(name, device) for name in BACKENDS]
    if device.type == "cpu":
        checks.append(_check("cpu, C++ kernels", device))
    compiled, compared = examine_model(model) if with_model else None, compare() if with_bits else None
    return Report(_machine(device) | sizes(cached_files(prefix_cache_dir)), _engine(device, dtype), checks, compiled, compared)


def cached_files(prefix_cache_dir: str | None) -> dict[str, list[Path]]:
    """Return the files that are kept for later processes, which can be deleted at any time.

    prefix_cache_dir: the folder of prefixes. None: no prefixes are listed, because no folder is their default.
    """
    cache = cache_folder()
    kept = {
        "compiled kernels": [*cache.glob(native.PATTERN), *(cache / "kernels").glob(native.PATTERN)],
        "packed weights": [*(cache / "packed").glob(packs.PATTERN)],
    }
    if prefix_cache_dir is not None:
        kept[f"prefixes in {prefix_cache_dir}"] = [*Path(os.path.expanduser(prefix_cache_dir)).glob(block_files.PATTERN)]
    return kept


def sizes(kept: dict[str, list[Path]]) -> dict[str, str]:
    """Describe the sizes of files, as names and values to print."""
    num_bytes = {name: sum(path.stat().st_size for path in paths) for name, paths in kept.items()}
    return {name: f"{num_bytes[name] / 2**20:,.1f} MiB in {len(paths)} files" for name, paths in kept.items()}


def remove_cached(prefix_cache_dir: str | None) -> dict[str, str]:
    """Remove what cached_files returns. Returns its sizes, as names and values to print."""
    kept = cached_files(prefix_cache_dir)
    removed = sizes(kept)
    for path in chain(*kept.values()):
        path.unlink(missing_ok=True)
    return removed


def print_removed(removed: dict[str, str]) -> None:
    print_table(("", ""), removed.items(), title="removed", title_justify="left")


def print_report(report: Report, *, with_kernels: bool = False) -> None:
    """Print a table for each field of the report. Without kernels, only the backends that failed are listed."""
    listed = report.checks if with_kernels else [check for check in report.checks if check.failed]
    num_right = sum(check.difference is not None and not check.failed for check in report.checks)
    summary = {} if with_kernels else {"attention backends": f"{num_right} give the reference's result; --kernels lists all"}
    tables = {
        "this machine": report.machine,
        "what the engine will use": report.engine | summary,
        "attention backends, compared with the reference": {check.backend: check.result for check in listed},
        "what was compiled of the model": report.model,
        "tokens and log-probabilities in float32": report.bits,
    }
    for title, pairs in tables.items():
        if pairs:
            print_table(("", ""), pairs.items(), title=title, title_justify="left")
            print()


def _machine(device: torch.device) -> dict[str, str]:
    known = environment.machine()
    gpu = f"{known['GPU']}"
    if device.type == "cuda":
        free, total = (num_bytes / 2**30 for num_bytes in torch.cuda.mem_get_info())
        major, minor = torch.cuda.get_device_capability()
        gpu += f", compute capability {major}.{minor}, {free:.1f} of {total:.1f} GiB free"
    limit_threads()
    quota = "" if cpu_quota() is None else f", the container may use {cpu_quota():g}"
    found = {
        "nanoinfer": f"{nanoinfer.__version__} in {Path(nanoinfer.__file__).parent}",
        "system": platform.platform(),
        "Python": f"{platform.python_version()}, {platform.python_implementation()}",
        "CPU": f"{known['CPU']}, {'with' if cpu_has_fast_bf16() else 'without'} fast bfloat16",
        "CPU threads torch uses": f"{torch.get_num_threads()} of {os.cpu_count()}{quota}",
        "memory": f"{known['memory']}, of which {available_cpu_memory() / 2**30:.1f} GiB are available",
        "C++ compiler": _compiler(),
        "kernels are kept in": _folder(cache_folder()),
        "models are kept in": _folder(Path(HF_HUB_CACHE)),
        "GPU": gpu,
        "torch": torch.__version__,  # has the build (2.13.0+cpu), which the metadata lacks
    }
    for package in ("transformers", "tokenizers", "safetensors", "numpy", "triton", "flash-attn", "fastapi", "llguidance"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    names = [name for name in os.environ if name.startswith(("NANOINFER_", "OMP_", "MKL_", "KMP_", "HF_")) or name == "CXX"]
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    settings = [name if any(word in name for word in secret) else f"{name}={os.environ[name]}" for name in sorted(names)]
    return found | {"environment": " ".join(settings) or "none of NANOINFER_*, OMP_*, MKL_*, KMP_*, HF_*, CXX"}


def _folder(path: Path) -> str:
    """Describe a folder, and the space on its disk."""
    if path.parts[0].startswith("~"):
        return f"{path}, which CANNOT be found, because this user has no home folder; set HOME"
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    access = "" if os.access(existing, os.W_OK) else ", which CANNOT be written"
    return f"{path}, {shutil.disk_usage(existing).free / 2**30:.1f} GiB free{access}"


def _compiler() -> str:
    """Return the compiler of the kernels, the first line of its --version and its options, or why there is none."""
    try:
        path, *options = find_compiler().command
        done = subprocess.run([path, *options, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (UnsupportedError, OSError, subprocess.TimeoutExpired) as error:
        return f"none: {first_line(error)}"
    version = done.stdout.strip().partition("\n")[0] or f"no --version, exit status {done.returncode}"
    return f"{path}: {version}, with {shlex.join(options)}"


def _engine(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """List what LLM(...) would choose by default for a checkpoint in bfloat16 with heads of HEAD_DIM."""
    name, backend = select_backend("auto", device, dtype, HEAD_DIM)
    remark = ", less weights, a step and its CUDA graphs" if device.type == "cuda" else ""
    chosen = {
        "device": str(device),
        "dtype of a bfloat16 checkpoint": str(dtype).removeprefix("torch."),
        "attention": f"{name}, blocks of {backend.default_block_size} tokens",
        "memory for the KV cache": f"{memory_for_cache(device, None, 0.9) / 2**30:.1f} GiB{remark}",
    }
    if device.type == "cpu":
        try:
            _kernel_backend(dtype)
            kernels = f"C++ kernels, {find_target().origin}"
        except UnsupportedError as error:
            kernels = f"torch, slowly: {error}"
        chosen["layers and attention computed by"] = kernels
        chosen["threads of the kernels"] = f"{torch.get_num_threads()}; those that wait spin briefly, then sleep"
    return chosen


def _kernel_backend(dtype: torch.dtype) -> KernelBackend:
    return KernelBackend(dtype, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)


def examine_model(model: str | None) -> dict[str, str]:
    """Load a model and compile it. Returns module -> text: whether it was compiled, or why not.

    Raises: the errors of loading.
    """
    config = EngineConfig(model=model)
    runtime = make_runtime(load(config)[0].model, config)
    bits = "the same in any batch" if runtime.is_batch_independent else "may depend on the batch"
    if runtime.report is None:
        return {"the model": "runs as it is: there is no C++ compiler for its kernels", "a row's bits": bits}
    is_gpu = runtime.device.type != "cpu"
    graphs = {"CUDA graphs": describe_graphs(runtime, size_cache(runtime, config).num_graph_tokens)} if is_gpu else {}
    compiled = {path or "the model": f"compiled, {num} kernel calls" for path, num in runtime.report.compiled.items()}
    left = {path or "the model": f"runs as it is: {why}" for path, why in runtime.report.left.items()}
    return compiled | left | graphs | {"a row's bits": bits}


def _check(name: str, device: torch.device) -> Check:
    reason = None
    for dtype in (torch.float32, torch.bfloat16):  # the first dtype that the backend supports
        backend_class: Any
        backend_class, reason = (KernelBackend, None) if "C++" in name else find_backend(name, device, dtype, HEAD_DIM, None)
        if backend_class is None:
            continue
        try:
            backend = _kernel_backend(dtype) if backend_class is KernelBackend else backend_class(enforce_eager=False)
            expected = _attend(ReferenceBackend(), device, torch.float32)
            difference = (_attend(backend, device, dtype) - expected).abs().max().item()
        except UnsupportedError as error:
            reason = str(error)
            continue
        except Exception as error:  # a broken installation may raise anything
            return Check(name, None, f"failed: {first_line(error)}", True)
        is_right = difference < TOLERANCE[dtype]
        result = f"{'right' if is_right else 'WRONG'} in {str(dtype).removeprefix('torch.')}, off by {difference:.1e}"
        result += f", computed by {backend.library}" if hasattr(backend, "library") else ""
        return Check(name, difference, result, not is_right)
    return Check(name, None, f"cannot be used: {reason}", False)


def _attend(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Attend with the new tokens over random numbers, which are the same for every backend.

    Returns: [num_tokens, num_heads, head_dim].
    """
    block_size = backend.default_block_size
    sequences = scratch_sequences([[0] * (old + new) for old, new in LENGTHS], block_size)
    cache = KVCache(
        num_layers=1,
        num_blocks=sum(len(seq.block_table) for seq in sequences),
        block_size=block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
        layout=backend.layout,
    )
    generator = torch.Generator().manual_seed(0)
    out = torch.empty(0)
    for nums in zip(*LENGTHS, strict=True):  # a step for the old tokens, then a step for the new tokens
        scheduled = tuple(ScheduledSequence(seq, num) for seq, num in zip(sequences, nums, strict=True) if num)
        batch = ForwardBatch.build(StepPlan(scheduled), block_size, device)
        q, k, v = torch.randn(len(batch.input_ids), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator).split(
            [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1
        )
        out = backend.begin_step(cache, batch.attention)(0, *(x.to(device, dtype) for x in (q, k, v)))
        for item in scheduled:
            item.sequence.num_computed_tokens += item.num_new_tokens
    return out.float()
