"""The host's part of a decode step of a GPU, on any CPU: the engine as on a GPU, over a device that does nothing.

Only what is the device's is replaced: a copy to pinned memory is a copy, `to` is none, a replay leaves its graph's output as it
is, and an event has always happened. The model's own computations, which a GPU does in its graphs, return the same zeros.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.device.parts import Results, Setup
from benchmarks.device.watch import Watch
from nanoinfer.build import make_executor, make_planner
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.runtime import plain_runtime
from nanoinfer.fast.compile import CompiledModel
from nanoinfer.fast.cuda import accelerate, steady
from nanoinfer.fast.sampling import cuda_graphs
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.sampling import sampler
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.system.transfer import HostCopy

PARAMETERS = {"greedy": {"temperature": 0.0}, "full": {"temperature": 1.0, "top_k": 40, "top_p": 0.9}}
ROWS, CONTEXT, BLOCK_SIZE, NUM_STEPS = (1, 16, 64, 256), 64, 16, 64


class Device(str):
    """A device that torch takes for the CPU and the engine for a GPU, so that the engine prepares every transfer."""

    type, index = "cuda", 0  # type: ignore[assignment]


class Capture:
    """In the place of CUDACapture: runs what a graph captures once, and its replays do nothing."""

    def __init__(self, device: object) -> None:
        pass

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return (lambda: None), run()


class Sampled(sampler.SampledTokens):
    """Tokens whose ids are copied to pinned memory, with an event, as those of a GPU."""

    def __init__(self, token_ids: Tensor, *arguments: Any) -> None:
        super().__init__(token_ids, *arguments)
        copied = torch.empty(token_ids.shape, dtype=token_ids.dtype)
        copied.copy_(token_ids, non_blocking=True)
        self._on_host = HostCopy(copied)


@contextmanager
def engine_of(num_rows: int) -> Iterator[LLMEngine]:
    """Make the engine of a GPU for a number of sequences."""
    scheduler = SchedulerConfig(max_num_seqs=max(ROWS))
    cache = CacheConfig(kv_cache_memory=2**28, block_size=BLOCK_SIZE)
    config = EngineConfig(async_scheduling=True, seed=0, attention_backend="reference", scheduler=scheduler, cache=cache)
    model: Any = load_model(Checkpoint.open(None), "float32", "cpu")
    zeros = torch.zeros(2 * scheduler.max_num_batched_tokens, max(model.config.hidden_size, model.config.vocab_size))
    model.forward = lambda ids, positions, attend: zeros[: len(ids), : model.config.hidden_size]
    model.compute_logits = lambda hidden: zeros[: len(hidden), : model.config.vocab_size]

    def sevens(logits: Tensor, *parameters: object) -> Tensor:
        return torch.full((len(logits),), 7)

    with ExitStack() as stack:
        for owner, name, value in (
            (Tensor, "pin_memory", Tensor.clone), (sampler, "SampledTokens", Sampled),
            (accelerate, "CUDACapture", Capture), (accelerate, "compile_model", CompiledModel),
            (accelerate, "find_spec", lambda name: True),  # Triton's kernels are the device's
            (cuda_graphs, "sample_on_gpu", sevens), (steady, "sample_on_gpu", sevens),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        for name in ("empty_cache", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            stack.enter_context(mock.patch.object(torch.cpu, name, create=True, return_value=0))
        stack.enter_context(mock.patch.object(torch.cpu, "mem_get_info", create=True, return_value=(2**34, 2**34)))
        plain = plain_runtime(model, config)
        stack.enter_context(mock.patch.object(type(plain.backend), "supports_cuda_graph", True))
        executor = make_executor(accelerate.accelerate_on_cuda(plain, config), config)
        executor.device = Device("cpu")  # type: ignore[assignment]
        yield LLMEngine(executor, config, planner=make_planner(executor, config))


def steps(setup: Setup) -> Results:
    """Yield the CPU time of a decode step and of its parts, and its Python and C calls, by the number of rows."""
    torch.set_num_threads(1)
    for num_rows in ROWS[:2] if setup.is_simulated else ROWS:
        for kind, parameters in PARAMETERS.items():
            with engine_of(num_rows) as engine:
                start_decoding(engine, num_rows, parameters)
                num_steps = 1 if setup.is_simulated else NUM_STEPS
                start = time.thread_time()
                for _ in range(num_steps):
                    engine.step()
                us = 1e6 * (time.thread_time() - start) / num_steps
                watch = Watch(clock=time.thread_time)
                with watch.engine(engine):
                    for _ in range(num_steps):
                        engine.step()
                python, c = calls_of(engine)
                times = {name.replace("ms", "us"): round(1e3 * ms, 1) for name, ms in watch.medians().items()}
                yield {
                    "what": f"{num_rows} rows, {kind}",
                    "CPU, us": round(us, 1),
                    "Python calls": python,
                    "C calls": c,
                } | times


def start_decoding(engine: LLMEngine, num_rows: int, parameters: dict[str, Any]) -> None:
    """Let requests run until each has had a few decode steps."""
    params = SamplingParams(max_tokens=500, ignore_eos=True, detokenize=False, **parameters)
    vocab_size = engine.executor.info.vocab_size
    for number in range(num_rows):
        engine.add_request([(31 * number + position) % vocab_size for position in range(CONTEXT)], params)
    while len(engine.scheduler.running) < num_rows or any(seq.num_output_tokens < 4 for seq in engine.scheduler.running):
        engine.step()


def calls_of(engine: LLMEngine) -> tuple[float, float]:
    """Return the mean numbers of Python and C calls of a step, over steps in which each sequence begins one block."""
    calls = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: object) -> None:
        if event in calls:
            calls[event] += 1

    sys.setprofile(count)
    for _ in range(BLOCK_SIZE):
        engine.step()
    sys.setprofile(None)
    return calls["call"] / BLOCK_SIZE, calls["c_call"] / BLOCK_SIZE
