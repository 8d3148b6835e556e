"""Run workloads on an LLM in this process, and compute their figures from the time of each token.

In: a checkpoint and workloads. Out: a Measurement of each workload. serve.py measures a server.
"""

import time
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.memory import memory_for_cache
from nanoinfer.lab.bench.roofline import CACHE_SHARE, cache_bytes
from nanoinfer.lab.bench.timing import Figures, RequestTiming, figures
from nanoinfer.lab.bench.workloads import Workload
from nanoinfer.llm import LLM
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Measurement:
    """A workload's figures, those of the run with the median tokens per second."""

    workload: str
    figures: Figures


def run_workload(llm: LLM, workload: Workload, run: int) -> list[RequestTiming]:
    """Send each request at its time, and record when its tokens arrive. run: selects the prompts."""
    engine = llm.engine
    prompts = workload.prompts(llm.info.vocab_size, run)
    waiting = list(zip(workload.arrivals or [0.0] * len(prompts), prompts, workload.params(), strict=True))
    waiting.reverse()  # the next request is the last item
    timings, running = [], []
    start = time.perf_counter()
    while waiting or engine.num_unfinished:
        while waiting and start + waiting[-1][0] <= time.perf_counter():
            arrival, prompt, params = waiting.pop()
            request = engine.add_request(prompt, params)
            timings.append(RequestTiming(start + arrival, num_prompt_tokens=len(prompt)))
            running.append((request, timings[-1]))
        if not engine.num_unfinished:
            time.sleep(max(start + waiting[-1][0] - time.perf_counter(), 0))
            continue
        engine.step()
        now = time.perf_counter()
        for request, timing in running:
            timing.num_output_tokens = request.sequences[0].num_output_tokens
            timing.token_times += [now] * (timing.num_output_tokens - len(timing.token_times))  # several per step with drafts
        running = [(request, timing) for request, timing in running if request.output is None]
    return timings


def measure(checkpoint: str | None, workloads: list[Workload], *, repeats: int, **engine: Any) -> list[Measurement]:
    """Run each workload once to warm up, then `repeats` times, on the LLM that load() makes of the other arguments."""
    llm = load(checkpoint, workloads, **engine)
    for workload in workloads:
        run_workload(llm, workload, 0)
    measurements = []
    for workload in workloads:
        runs = [figures(run_workload(llm, workload, run)) for run in range(1, repeats + 1)]
        runs.sort(key=lambda found: found.output_tokens_per_s)
        measurements.append(Measurement(workload.name, runs[repeats // 2]))
    return measurements


def load(checkpoint: str | None, workloads: list[Workload], **engine: Any) -> LLM:
    """Load a model whose KV cache has the size that the largest workload needs, unless kv_cache_memory is given.

    A larger cache would be touched for the first time in the measured runs. On a GPU without the memory for it, the cache gets
    what is free, and requests wait.

    Args:
        engine: the arguments of LLM. dtype and device are required.

    Raises:
        InvalidValueError: a workload is too long for the model or the cache.
    """
    opened, device = Checkpoint.open(checkpoint), loader.resolve_device(engine["device"])
    dtype = loader.resolve_dtype("bfloat16" if engine.get("quantization") else engine["dtype"], opened, device)
    is_cache_given = engine.get("kv_cache_memory") is not None
    if not is_cache_given:
        config = loader.on_meta(opened)[0].config
        largest = max(cache_bytes(config, dtype, workload.num_tokens) for workload in workloads)
        if device.type == "cpu" or largest <= memory_for_cache(device, None, CACHE_SHARE):
            engine["kv_cache_memory"] = largest
    llm = LLM(checkpoint, seed=0, **engine)
    for workload in workloads:
        if (needed := max(workload.num_tokens)) > llm.engine.max_model_len:
            raise InvalidValueError(
                f"workload {workload.name} needs {needed} tokens at a time, but max_model_len is "
                f"{llm.engine.max_model_len}; pick a shorter one{', or raise kv_cache_memory' if is_cache_given else ''}"
            )
    return llm
