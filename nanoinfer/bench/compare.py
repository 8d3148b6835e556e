"""Workloads through nanoinfer and, in turns with it, through transformers: what a Comparison prints and what it has to reach.

In: a checkpoint or a shape, and workloads. Out: a Comparison for each.
"""

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer import models
from nanoinfer.bench.runners import NanoinferRunner, TransformersRunner
from nanoinfer.bench.shapes import write_checkpoint
from nanoinfer.bench.timing import Figures, figures
from nanoinfer.bench.workloads import Workload
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.errors import InvalidValueError
from nanoinfer.kv_cache import bytes_per_block
from nanoinfer.llm import LLM

# (shape, dtype) -> workload -> how many times transformers' speed has to be reached on a CPU with 2 threads
BARS = {
    ("gpt2", "bfloat16"): {"A": 2.9, "B16": 2.7, "B64": 2.7, "C": 1.7, "D": 6.5, "E": 4.6},
    ("gpt2", "float32"): {"A": 2.5, "B16": 3.4, "B64": 3.2, "C": 2.3, "D": 8.5, "E": 4.2},
    ("qwen3-0.6b", "bfloat16"): {"A": 2.3, "B16": 2.8, "B64": 2.9},
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """ours, theirs: the run with the median tokens per second. ratio: how many times as fast, by tokens per second, or by TTFT
    where a request has one token only; of medians. Memory in bytes, before transformers is loaded.
    """

    workload: str
    ours: Figures
    theirs: Figures | None
    ratio: float | None
    bar: float | None
    peak_memory: int
    num_weight_bytes: int
    num_cache_bytes: int


@contextmanager
def checkpoint_of(model: str | None, shape: str | None, dtype: str) -> Iterator[str | None]:
    """The model's name, or a folder of random weights in the shape, which is removed in the end."""
    if shape is None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder), dtype)
        yield folder


def compare(
    checkpoint: str | None,
    workloads: list[Workload],
    *,
    shape: str | None,
    repeats: int,
    with_transformers: bool,
    **engine: Any,
) -> list[Comparison]:
    """Each workload once to warm up, which does not count, then `repeats` times. engine: LLM's arguments.

    Unless kv_cache_memory is given, the cache holds what the largest workload needs: a larger one would be touched for the
    first time in the runs that count.
    """
    opened = Checkpoint.open(checkpoint)
    its_dtype = "bfloat16" if engine["quantization"] else engine["dtype"]
    dtype = models.resolve_dtype(its_dtype, opened, models.resolve_device(engine["device"]))
    model = models.on_meta(opened)
    config = model.config
    for workload in workloads:
        if workload.max_model_len > config.max_position_embeddings:
            raise InvalidValueError(
                f"workload {workload.name} pads to {workload.max_model_len} tokens, but this model knows "
                f"{config.max_position_embeddings} positions; pick shorter ones"
            )
    if engine.get("kv_cache_memory") is None:
        block = 256  # tokens: a multiple of every backend's
        num_blocks = max(sum(-(-(i + o) // block) for i, o in zip(w.input_lens, w.output_lens, strict=True)) for w in workloads)
        engine["kv_cache_memory"] = num_blocks * bytes_per_block(
            num_layers=config.num_hidden_layers,
            block_size=block,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
    llm = LLM(checkpoint, **engine)
    runner, peer = NanoinferRunner(llm), None
    for workload in workloads:
        runner.run(workload, 0)
    peak_memory = runner.peak_memory
    if with_transformers:
        peer = TransformersRunner(opened.path, dtype, llm.engine.device)
    results = []
    for workload in workloads:
        ours, theirs = [], []
        if peer is not None:
            peer.run(workload, 0)
        for run in range(1, repeats + 1):
            ours.append(figures(runner.run(workload, run), sum(workload.input_lens)))
            if peer is not None:
                theirs.append(figures(peer.run(workload, run), sum(workload.input_lens)))
        bars = BARS.get((shape or "", str(dtype).removeprefix("torch.")), {}) if peer is not None else {}
        results.append(
            Comparison(
                workload=workload.name,
                ours=_middle(ours),
                theirs=_middle(theirs) if theirs else None,
                ratio=_speed(ours) / _speed(theirs) if theirs else None,
                bar=bars.get(workload.name),
                peak_memory=peak_memory,
                num_weight_bytes=sum(weight.numel() for weight in model.parameters()) * dtype.itemsize,
                num_cache_bytes=engine["kv_cache_memory"],
            )
        )
    return results


def _speed(runs: list[Figures]) -> float:
    if runs[0].itl_ms is None:
        return 1.0 / statistics.median(run.ttft_ms.p50 for run in runs)
    return statistics.median(run.output_tokens_per_s for run in runs)


def _middle(runs: list[Figures]) -> Figures:
    return sorted(runs, key=lambda run: run.output_tokens_per_s)[len(runs) // 2]
