"""Run workloads on an LLM in this process, and compute their figures from the time of each token.

In: a checkpoint and workloads. Out: a Measurement of each workload. serve.py measures a server.
"""

import time
from typing import Any

from nanoinfer.engine.observer import Observer, together
from nanoinfer.engine.request import Request
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.executor import ExecutorInfo, StepOutput
from nanoinfer.execution.memory import memory_for_cache
from nanoinfer.llm import LLM
from nanoinfer.loading import devices, loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.outputs import Counter
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.system.progress import progress_bar
from nanoinfer_lab.bench.roofline import CACHE_SHARE, cache_bytes
from nanoinfer_lab.bench.timing import Figures, Measurement, RequestTiming, Run, figures
from nanoinfer_lab.bench.workloads import Workload


class TokenTimes(Observer):
    """Keeps each step's time, with a sequence per token."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[Sequence]]] = []

    def step_collected(self, plan: StepPlan, output: StepOutput) -> None:
        self.steps.append((time.perf_counter(), [out.sequence for out in output.sequences for _ in out.token_ids]))


def run_workload(llm: LLM, workload: Workload, run: int) -> list[RequestTiming]:
    """Send each request at its time, and record when its tokens arrive. run: selects the prompts."""
    engine = llm.engine
    prompts = workload.prompts(llm.info.vocab_size, run)
    arrivals = workload.arrivals or [0.0] * len(prompts)
    waiting = list(zip(arrivals, prompts, workload.params(), strict=True))[::-1]  # the next request is the last item
    timings = dict[Sequence, tuple[Request, RequestTiming]]()
    before, times = engine.observer, TokenTimes()
    engine.observer = together(before, times)
    start = time.perf_counter()
    try:
        while waiting or engine.num_unfinished:
            while waiting and start + waiting[-1][0] <= time.perf_counter():
                arrival, prompt, params = waiting.pop()
                request = engine.submit(engine.inputs.prepare(prompt, params))
                timings[request.sequences[0]] = request, RequestTiming(start + arrival, num_prompt_tokens=len(prompt))
            if engine.num_unfinished:
                engine.step()
            else:
                time.sleep(max(start + waiting[-1][0] - time.perf_counter(), 0))
    finally:
        engine.observer = before
    for now, sequences in times.steps:
        for seq in sequences:
            timings[seq][1].token_times.append(now)
    for request, timing in timings.values():
        timing.num_output_tokens = request.num_output_tokens
        del timing.token_times[timing.num_output_tokens :]  # tokens after the end are dropped
        timing.finish_reason = request.output.outputs[0].finish_reason if request.output else None
    return [timing for _, timing in timings.values()]


def measure(
    model: str | None, workloads: list[Workload], *, repeats: int, **engine: Any
) -> tuple[ExecutorInfo, list[Measurement[Figures]]]:
    """Run each workload once to warm up, then `repeats` times, on the LLM that load() makes of the other arguments.

    Returns: what the LLM has chosen, such as its dtype, and a Measurement of each workload.
    """
    llm = load(model, workloads, **engine)

    def measured(workload: Workload, run: int) -> Run[Figures]:
        before, timings = _counters(llm), run_workload(llm, workload, run)
        bar.update()
        return Run.of(figures(timings), timings, before, _counters(llm))

    with progress_bar("measuring", len(workloads) * (1 + repeats)) as bar:
        for workload in workloads:
            measured(workload, 0)
        found = [Measurement.of(one, [measured(one, run + 1) for run in range(repeats)]) for one in workloads]
    return llm.info, found


def _counters(llm: LLM) -> dict[str, int]:
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}


def load(model: str | None, workloads: list[Workload], **engine: Any) -> LLM:
    """Load a model whose KV cache has the size that the largest workload needs, unless kv_cache_memory is given.

    A larger cache would be touched for the first time in the measured runs. On a GPU without the memory for it, the cache gets
    what is free, and requests wait. With a model or a module that drafts, which needs a cache as well, LLM decides.

    Args:
        engine: the further arguments of LLM. dtype and device are required.

    Raises:
        InvalidValueError: a workload is too long for the model or the cache.
    """
    opened, device = Checkpoint.open(model, engine.get("revision")), devices.resolve_device(engine["device"])
    dtype = devices.resolve_dtype("bfloat16" if engine.get("quantization") else engine["dtype"], opened, device)
    is_cache_given = engine.get("kv_cache_memory") is not None
    has_drafter = (engine.get("speculative_config") or {}).get("method", "ngram") != "ngram"
    if not is_cache_given and not has_drafter:
        config = loader.on_meta(opened)[0].config
        largest = max(cache_bytes(config, dtype, workload.num_tokens) for workload in workloads)
        if device.type == "cpu" or largest <= memory_for_cache(device, None, CACHE_SHARE):
            engine["kv_cache_memory"] = largest
    reads_no_text = not (engine.get("tokenizer") or engine.get("calibration"))
    llm = LLM(model, seed=0, skip_tokenizer_init=reads_no_text, **engine)
    for workload in workloads:
        if (needed := max(workload.num_tokens)) > llm.engine.max_model_len:
            raise InvalidValueError(
                f"workload {workload.name} needs {needed} tokens at a time, but max_model_len is "
                f"{llm.engine.max_model_len}; pick a shorter one{', or raise kv_cache_memory' if is_cache_given else ''}"
            )
    return llm
