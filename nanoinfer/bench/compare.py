"""Run workloads through nanoinfer and, in turns, through transformers and other engines, and compare their speeds.

In: a checkpoint or a shape, and workloads. Out: a Comparison for each workload, with the bar it has to reach.
"""

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoinfer.attention.kv_cache import bytes_per_block_of
from nanoinfer.bench.peers.process import TRANSFORMERS, Peer, PeerProcess
from nanoinfer.bench.runners import NanoinferRunner, TransformersRunner, memory_in_use
from nanoinfer.bench.shapes import write_checkpoint
from nanoinfer.bench.timing import Figures, figures
from nanoinfer.bench.workloads import Workload
from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.llm import LLM
from nanoinfer.models import loader
from nanoinfer.models.checkpoint import Checkpoint

# (device type, shape, dtype) -> workload -> the speed to reach, as a multiple of transformers'. On a CPU, with 2 threads.
BARS = {
    ("cpu", "gpt2", "bfloat16"): {"A": 2.9, "B16": 2.7, "B64": 2.7, "C": 1.7, "D": 6.5, "E": 4.6},
    ("cpu", "gpt2", "float32"): {"A": 2.5, "B16": 3.4, "B64": 3.2, "C": 2.3, "D": 8.5, "E": 4.2},
    ("cpu", "qwen3-0.6b", "bfloat16"): {"A": 2.3, "B16": 2.8, "B64": 2.9},
    ("cuda", "qwen3-0.6b", "bfloat16"): {"F": 15.0},
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of one workload.

    ours, theirs: nanoinfer's and transformers' run with the median tokens per second.
    speeds: the median output tokens per second of each engine, by name, nanoinfer first.
    ratios: our speed divided by that of each peer.
    best: the fastest peer, or None without a peer.
    bar: the ratio to transformers to reach, or None.
    memory_in_use: bytes, by runners.memory_in_use, before transformers is loaded.
    """

    workload: str
    ours: Figures
    theirs: Figures | None
    speeds: dict[str, float]
    ratios: dict[str, float]
    best: str | None
    bar: float | None
    memory_in_use: int
    num_weight_bytes: int
    num_cache_bytes: int

    @property
    def verdict(self) -> str:
        """The bar and whether it is reached, or "" without a bar."""
        if self.bar is None:
            return ""
        return f"{self.bar}: {'reached' if self.ratios[TRANSFORMERS.name] >= self.bar else 'missed'}"


@contextmanager
def checkpoint_of(model: str | None, shape: str | None, dtype: str) -> Iterator[str | None]:
    """Yield the model's name, or a folder of random weights in the shape, which is removed at the end.

    Raises:
        InvalidValueError: both are given, or the shape is unknown.
    """
    if model is not None and shape is not None:
        raise InvalidValueError(f"give a model or a shape, not both, got {model!r} and {shape!r}")
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
    peers: list[Peer],
    **engine: Any,
) -> list[Comparison]:
    """Run each workload once to warm up, then `repeats` times.

    Unless kv_cache_memory is given, the cache has the size that the largest workload needs. A larger cache would be touched
    for the first time in the measured runs.

    Args:
        checkpoint: a name or a folder, as LLM takes it.
        workloads: run in this order.
        shape: the name of the checkpoint's shape, which selects the bars.
        repeats: measured runs of each workload.
        peers: run these, too, in turns.
        engine: arguments of LLM. dtype, device and quantization are required.

    Returns:
        One Comparison per workload.

    Raises:
        InvalidValueError: a workload is too long, or a peer does not support the device or the dtype.
        NanoinferError: a peer has failed.
    """
    opened = Checkpoint.open(checkpoint)
    requested_dtype = "bfloat16" if engine["quantization"] else engine["dtype"]
    device = loader.resolve_device(engine["device"])
    dtype = loader.resolve_dtype(requested_dtype, opened, device)
    if peers not in ([], [TRANSFORMERS]) and (device.type != "cpu" or dtype == torch.float16):
        raise InvalidValueError(
            "compare with engines other than transformers requires device=cpu and dtype bfloat16 or float32, got "
            f"{device.type} and {str(dtype).removeprefix('torch.')}"
        )
    model, _ = loader.on_meta(opened)
    config = model.config
    is_cache_given = engine.get("kv_cache_memory") is not None
    if not is_cache_given:
        engine["kv_cache_memory"] = max(cache_bytes(config, dtype, workload.num_tokens) for workload in workloads)
    llm = LLM(checkpoint, seed=0, **engine)
    for workload in workloads:
        if (needed := workload.longest(padded=TRANSFORMERS in peers)) > llm.engine.max_model_len:
            raise InvalidValueError(
                f"workload {workload.name} needs {needed} tokens at a time, but max_model_len is "
                f"{llm.engine.max_model_len}; pick a shorter one{', or raise kv_cache_memory' if is_cache_given else ''}"
            )
    runners: dict[str, NanoinferRunner | TransformersRunner] = {"nanoinfer": NanoinferRunner(llm)}
    for workload in workloads:
        runners["nanoinfer"].run(workload, 0)
    info = llm.engine.executor.info
    in_use = memory_in_use(device)
    if TRANSFORMERS in peers:
        runners[TRANSFORMERS.name] = TransformersRunner(opened.path, dtype, device)
    bars: dict[str, float] = {}
    if TRANSFORMERS in peers and (device.type == "cuda" or torch.get_num_threads() == 2) and not engine["quantization"]:
        bars = BARS.get((device.type, shape or "", str(dtype).removeprefix("torch.")), {})
    results = []
    with ExitStack() as stack:
        processes = {}
        for peer in peers:
            if peer != TRANSFORMERS:
                process = PeerProcess(
                    peer,
                    opened.path,
                    dtype=str(dtype).removeprefix("torch."),
                    num_threads=torch.get_num_threads(),
                    max_model_len=max(workload.longest(padded=False) for workload in workloads),
                    max_num_seqs=min(SchedulerConfig.max_num_seqs, max(workload.num_requests for workload in workloads)),
                    num_cache_tokens=info.num_blocks * info.block_size,
                )
                processes[peer.name] = stack.enter_context(closing(process))
        for workload in workloads:
            timed, speeds = _take_turns(workload, repeats, runners, processes, info.vocab_size)
            ratios = {name: speeds["nanoinfer"] / speed for name, speed in speeds.items() if name != "nanoinfer"}
            results.append(
                Comparison(
                    workload=workload.name,
                    ours=timed["nanoinfer"],
                    theirs=timed.get(TRANSFORMERS.name),
                    speeds=speeds,
                    ratios=ratios,
                    best=min(ratios, key=ratios.__getitem__, default=None),
                    bar=bars.get(workload.name),
                    memory_in_use=in_use,
                    num_weight_bytes=sum(weight.numel() for weight in model.parameters()) * dtype.itemsize,
                    num_cache_bytes=info.num_cache_bytes,
                )
            )
    return results


def _take_turns(
    workload: Workload,
    repeats: int,
    runners: dict[str, NanoinferRunner | TransformersRunner],
    processes: dict[str, PeerProcess],
    vocab_size: int,
) -> tuple[dict[str, Figures], dict[str, float]]:
    """Run a workload in every engine, `repeats` times. Return each runner's median Figures, and each engine's median tok/s."""
    timed: dict[str, list[Figures]] = {name: [] for name in runners}
    speeds: dict[str, list[float]] = {name: [] for name in [*runners, *processes]}
    if theirs := runners.get(TRANSFORMERS.name):
        theirs.run(workload, 0)  # nanoinfer is warm already
    for process in processes.values():
        process.run(workload, workload.prompts(vocab_size, 0))
    for run in range(1, repeats + 1):
        for name, runner in runners.items():
            timed[name].append(figures(runner.run(workload, run), sum(workload.input_lens)))
            speeds[name].append(timed[name][-1].output_tokens_per_s)
        for name, process in processes.items():
            seconds = process.run(workload, workload.prompts(vocab_size, run))
            speeds[name].append(sum(workload.output_lens) / seconds)
    middle = {name: sorted(runs, key=lambda run: run.output_tokens_per_s)[repeats // 2] for name, runs in timed.items()}
    return middle, {name: statistics.median(runs) for name, runs in speeds.items()}


def cache_bytes(config: Any, dtype: torch.dtype, num_tokens: list[int]) -> int:
    """Bytes of a KV cache for the largest sequences that run at once.

    Args:
        config: the model's.
        dtype: the cache's.
        num_tokens: the length of each sequence.
    """
    block = 256  # tokens: a multiple of every backend's block size
    num_blocks = sum(sorted((-(-tokens // block) for tokens in num_tokens), reverse=True)[: SchedulerConfig.max_num_seqs])
    return num_blocks * bytes_per_block_of(config, block, dtype)
