"""Parts that measure the engine as its users see it: workloads, the halves of a step, latency, prompts, graphs."""

import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from benchmarks.baselines.process import parse_baselines
from benchmarks.compare import compare
from benchmarks.device.parts import Results, Setup
from benchmarks.device.watch import Watch
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer_lab.bench.offline import load, run_workload
from nanoinfer_lab.bench.workloads import Workload, named

MAX_RATIO = 3  # of the 99th percentile of the inter-token latency and its median
TINY = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "chunk_size": 16, "max_model_len": 28, "block_size": 4}


def llm_for(setup: Setup, workloads: list[Workload], **options: Any) -> LLM:
    """Make an LLM whose cache has room for the workloads."""
    if setup.is_simulated:
        options = {"kv_cache_memory": 2**20, **TINY, **options}
    return load(setup.model, workloads, dtype="float32" if setup.is_simulated else "auto", device=setup.device, **options)


def chosen(setup: Setup, names: str) -> list[Workload]:
    """Look up workloads. On the simulated device: two requests of the first, with a step after the prompt."""
    if not setup.is_simulated:
        return named(names)
    return [replace(named(names)[0], input_lens=(5, 5), output_lens=(2, 2))]


def generate_s(llm: LLM, workload: Workload, run: int) -> float:
    """Return the seconds of LLM.generate, which is timed as a whole, as other engines are."""
    prompts = workload.prompts(llm.info.vocab_size, run)
    start = time.perf_counter()
    llm.generate(prompts, workload.params(), use_tqdm=False)
    return time.perf_counter() - start


def workloads(setup: Setup) -> Results:
    workloads = chosen(setup, "A,B16,B64,C,E,F")
    llm = llm_for(setup, workloads)
    for workload in workloads:
        generate_s(llm, workload, 0)
        for run in range(1, 2 if setup.is_simulated or workload.name == "F" else 4):
            seconds = generate_s(llm, workload, run)
            yield {"what": workload.name, "tokens/s": sum(workload.output_lens) / seconds, "ms": 1e3 * seconds}


def beside_nano_vllm(setup: Setup) -> Results:
    """Measure both engines interleaved (compare.py). On the simulated device: transformers, both on the CPU."""
    baselines = parse_baselines("transformers" if setup.is_simulated else "nano-vllm")
    device, repeats = ("cpu", 1) if setup.is_simulated else (setup.device, 3)
    workloads = chosen(setup, "A,B16,B64,C,E,F")
    for result in compare(setup.model, workloads, repeats=repeats, baselines=baselines, dtype="auto", device=device):
        speeds = {f"{name}, tokens/s": speed for name, speed in result.speeds.items()}
        yield {"what": result.workload, **speeds, "ratio": result.ratios[baselines[0].name]}


def steps(setup: Setup) -> Results:
    """Measure a step's two halves, with and without overlap: the GPU between events, and the parts of the host."""
    workloads, watch = chosen(setup, "A,B64,E,F"), Watch(torch.get_device_module(setup.device))
    with watch.graphs():
        llm = llm_for(setup, workloads)
        for workload in workloads:
            generate_s(llm, workload, 0)
            for overlaps in (True, False):
                llm.engine.async_scheduling = overlaps
                with watch.engine(llm.engine):
                    generate_s(llm, workload, 1 + overlaps)
                yield {"what": f"{workload.name}, {'with' if overlaps else 'without'} overlap", **watch.medians()}


def latency(setup: Setup) -> Results:
    """Let prompts arrive while streams run, and compare the 99th percentile of their inter-token latency with the median."""
    streams, (num_in, num_out), prompts, length = (2, (5, 3), 1, 9) if setup.is_simulated else (64, (64, 512), 20, 1023)
    workload = Workload(
        name="latency",
        input_lens=(num_in,) * streams + (length,) * prompts,
        output_lens=(num_out,) * streams + (1,) * prompts,
        arrivals=(0.0,) * streams + tuple(0.06 * (1 + number) for number in range(prompts)),
    )
    llm = llm_for(setup, [workload])
    for run in range(2 if setup.is_simulated else 4):
        timings = run_workload(llm, workload, run)[:streams]
        if run == 0:
            continue  # it captures and compiles
        gaps = sorted(after - before for timing in timings for before, after in pairwise(timing.token_times))
        median, p99 = statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))]
        yield {"what": f"{streams} streams, {prompts} prompts of {length}", "median, ms": 1e3 * median, "p99, ms": 1e3 * p99,
               "ratio": p99 / median, "at most": MAX_RATIO}  # fmt: skip


def prompts(setup: Setup) -> Results:
    """Compare steps with prompts, which graphs may compute, with eager ones: times, tokens, log-probabilities."""
    lens = (5,) if setup.is_simulated else (60, 100, 500, 1000, 1023, 2000)
    alone = [Workload(name=f"a prompt of {length}", input_lens=(length,), output_lens=(1,)) for length in lens]
    mixed = (3, 20, 12) if setup.is_simulated else (30, 700, 500, 90, 1500) * 3
    chunks = Workload(name=f"{len(mixed)} prompts in chunks", input_lens=mixed, output_lens=(4,) * len(mixed))
    small = {} if setup.is_simulated else {"max_num_batched_tokens": 512, "chunk_size": 256}  # chunks beside decodes
    for workloads, options in ((alone, {}), ([chunks], small)):
        llms = [llm_for(setup, workloads, enforce_eager=is_eager, **options) for is_eager in (False, True)]
        for workload in workloads:
            yield {"what": workload.name, **_compared(workload, *llms, num_runs=1 if setup.is_simulated else 5)}
        for llm in llms:
            llm.close()


def _compared(workload: Workload, ours: LLM, eager: LLM, *, num_runs: int) -> dict[str, float]:
    """Return the median milliseconds of both interleaved, the share of equal answers, and how far log-probabilities differ."""
    lens = [length + 4 for length in workload.output_lens]
    params = [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False, logprobs=1) for num in lens]
    given = workload.prompts(ours.info.vocab_size, 0)
    answers = [[one.outputs[0] for one in llm.generate(given, params, use_tqdm=False)] for llm in (ours, eager)]
    pairs = list(zip(*answers, strict=True))
    times = [[generate_s(llm, workload, 1 + run) for llm in (ours, eager)] for run in range(num_runs)]
    ms, eager_ms = (1e3 * statistics.median(of_llm) for of_llm in zip(*times, strict=True))
    return {
        "ms": ms,
        "eager, ms": eager_ms,
        "equal answers": sum(one.token_ids == other.token_ids for one, other in pairs) / len(pairs),
        "difference of logprobs": max(abs(one.cumulative_logprob - other.cumulative_logprob) for one, other in pairs),
    }


def graphs(setup: Setup) -> Results:
    """Count what is captured until each workload has run: graphs, their nodes, the seconds, and the free memory."""
    gpu, captured = torch.get_device_module(setup.device), list[tuple[int | None, float]]()
    plain, made = gpu.graph, gpu.CUDAGraph

    @contextmanager
    def timed(graph: Any, **options: Any) -> Iterator[None]:
        start = time.perf_counter()
        with plain(graph, **options):
            yield
        if not setup.is_simulated:
            graph.instantiate()  # with keep_graph, the first replay would do it
        captured.append((len(graph.launched) if setup.is_simulated else num_nodes(graph), time.perf_counter() - start))

    free, workloads = [gpu.mem_get_info()[0]], chosen(setup, "A,B16,B64,C,E")
    kept = made if setup.is_simulated else partial(made, keep_graph=True)
    with mock.patch.object(gpu, "graph", timed), mock.patch.object(gpu, "CUDAGraph", kept):
        llm = llm_for(setup, workloads)
        free.append(gpu.mem_get_info()[0])
        for workload in workloads:
            generate_s(llm, workload, 0)
    free.append(gpu.mem_get_info()[0])
    yield {"what": "graphs", "number": len(captured), "capture, s": sum(seconds for _, seconds in captured),
           "nodes": [num for num, _ in captured], "MiB free before, loaded, after": [num // 2**20 for num in free]}  # fmt: skip


def num_nodes(graph: Any) -> int | None:
    """Return the number of nodes of a CUDA graph, or None if the driver does not say it."""
    count, raw = ctypes.c_size_t(), ctypes.c_void_p(graph.raw_cuda_graph())
    failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(raw, None, ctypes.byref(count))
    return None if failed else count.value
