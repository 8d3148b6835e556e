"""`nanoinfer doctor`: what this machine has, what the engine will use of it, and whether each attention backend is right.

A backend is right if, in a small step with random numbers, it gives what the reference backend gives in fp32.
"""

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

import torch
from rich.console import Console

from nanoinfer.attention.base import BACKENDS, AttentionBackend, find_backend, select_backend
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.cli.options import new_table
from nanoinfer.devices import machine_checks, openmp
from nanoinfer.errors import first_line
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.memory import memory_for_cache
from nanoinfer.execution.scratch import scratch_sequences
from nanoinfer.models import loader
from nanoinfer.models.gpt2 import GPT2Block, GPT2Config
from nanoinfer.models.optimize import optimize_for_cpu
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 64, 4, 2
# (cached tokens, new tokens) of each sequence of the step: two that decode, a chunk after a prefix, a whole prompt
LENGTHS = ((40, 1), (300, 1), (70, 30), (0, 90))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


@dataclass(frozen=True, slots=True)
class Check:
    """A backend's verdict.

    difference: the largest one from the reference, or None where the backend was not run or raised.
    words: the verdict to print.
    """

    backend: str
    difference: float | None
    words: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The findings, in (name, value) pairs to print.

    verdicts: what devices/machine_checks.py keeps of the models that were loaded before.
    """

    machine: list[tuple[str, str]]
    engine: list[tuple[str, str]]
    verdicts: list[tuple[str, str]]
    checks: list[Check]


def examine() -> Report:
    """Examine the machine, and run every backend that can run on it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" or loader.cpu_has_fast_bf16() else torch.float32
    checks = [_check(name, device) for name in BACKENDS]
    return Report(_machine(device), _engine(device, dtype), list(machine_checks.verdicts().items()), checks)


def print_report(report: Report) -> None:
    """Print a table of each part of the report."""
    tables = {
        "this machine": report.machine,
        "what the engine will use": report.engine,
        f"measured before, kept in {machine_checks.cache_path()}": report.verdicts,
        "attention backends, beside the reference": [(check.backend, check.words) for check in report.checks],
    }
    console = Console()
    for title, pairs in tables.items():
        table = new_table("", "", title=title, title_justify="left", show_header=False)
        for pair in pairs:
            table.add_row(*pair)
        console.print(table, "")


def _machine(device: torch.device) -> list[tuple[str, str]]:
    found = [
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        ("CPU threads torch uses", f"{torch.get_num_threads()} of {os.cpu_count()}"),
        ("CPU with fast bfloat16", "yes" if loader.cpu_has_fast_bf16() else "no"),
        ("C++ compiler", next((path for name in ("g++", "clang++", "cl") if (path := shutil.which(name))), "none")),
        ("GPU", "none that torch sees"),
    ]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        found[-1] = (
            "GPU",
            f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free",
        )
    found.append(("torch", torch.__version__))  # unlike its metadata, it says which build: 2.13.0+cpu, 2.13.0+cu130
    for package in ("transformers", "triton", "flash-attn"):
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, "not installed"))
    return found


def _engine(device: torch.device, dtype: torch.dtype) -> list[tuple[str, str]]:
    """What LLM(...) would choose by default for a checkpoint in bfloat16 with heads of HEAD_DIM."""
    name, backend = select_backend("auto", device, dtype, HEAD_DIM)
    remark = ", less weights and a step" if device.type == "cuda" else ""
    chosen = [
        ("device", str(device)),
        ("dtype of a bfloat16 checkpoint", str(dtype).removeprefix("torch.")),
        ("attention", f"{name}, blocks of {backend.default_block_size} tokens"),
        ("memory for the KV cache", f"{memory_for_cache(device, None, 0.9) / 2**30:.1f} GiB{remark}"),
    ]
    if isinstance(backend, CPUBackend):
        backend.warm_up(KVCache(num_layers=1, num_blocks=1, block_size=1, num_kv_heads=1, head_dim=HEAD_DIM, dtype=dtype), 1)
        chosen.append(("attention computed in", backend.form))
    if device.type == "cpu":
        report = optimize_for_cpu(_gpt2_block(dtype))
        chosen += [(f"linear layer {kind}", form) for kind, form in report.forms.items()]
        bits = "the same in any batch" if report.are_rows_independent else "depend on the batch"
        chosen.append(("a row's bits in these", bits))
        chosen.append(("waiting threads", openmp.describe()))
    return chosen


def _gpt2_block(dtype: torch.dtype) -> torch.nn.Module:
    """A model of one block of GPT-2, to see how this machine computes its linear layers."""
    config = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 1, "n_head": 12}
    return torch.nn.Sequential(GPT2Block(GPT2Config.from_hf(config), layer=0)).to(dtype)


def _check(name: str, device: torch.device) -> Check:
    reason = None
    for dtype in (torch.float32, torch.bfloat16):  # the first dtype that the backend supports
        backend_class, reason = find_backend(name, device, dtype, HEAD_DIM, None)
        if backend_class is None:
            continue
        try:
            backend = backend_class(enforce_eager=False)
            difference = (
                (_attend(backend, device, dtype) - _attend(ReferenceBackend(), device, torch.float32)).abs().max().item()
            )
        except Exception as error:  # a broken installation may raise anything
            return Check(name, None, f"failed: {first_line(error)}", True)
        is_right = difference < TOLERANCE[dtype]
        words = f"{'right' if is_right else 'WRONG'} in {str(dtype).removeprefix('torch.')}, off by {difference:.1e}"
        return Check(name, difference, words, not is_right)
    return Check(name, None, f"cannot be used: {reason}", False)


def _attend(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Attention of the new tokens over random numbers, the same for every backend: [num_tokens, num_heads, head_dim]."""
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
    for nums in zip(*LENGTHS, strict=True):  # a step for the old tokens, then one for the new
        scheduled = tuple(ScheduledSequence(seq, num) for seq, num in zip(sequences, nums, strict=True) if num)
        batch = ForwardBatch.build(StepPlan(scheduled), block_size, device)
        q, k, v = torch.randn(len(batch.input_ids), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, generator=generator).split(
            [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1
        )
        out = backend.begin_step(cache, batch.attention)(0, *(x.to(device, dtype) for x in (q, k, v)))
        for item in scheduled:
            item.sequence.num_computed_tokens += item.num_new_tokens
    return out.float()
