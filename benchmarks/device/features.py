"""Parts that measure what a GPU has by kernels of its own: fewer bits, experts, Gemma 3, adapters, the same bits, sleep.

A feature that the engine refuses is a result as well: its line has the error.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks import lora
from benchmarks.device.engine import chosen, generate_s, llm_for
from benchmarks.device.parts import Results, Setup
from nanoinfer.errors import NanoinferError
from nanoinfer.fast.cuda.graphs import StepGraphs
from nanoinfer.llm import LLM
from nanoinfer.sampling_params import SamplingParams
from nanoinfer_lab.bench.workloads import Workload

LEAST_RATIO = 1.4  # of F with the int8 cache, and of A with int8 weights, to bfloat16
# (workload, what is changed, the arguments of LLM). The first of a workload is what the others are divided by.
FEWER_BITS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("F", "bfloat16", {}),
    ("F", "int8 cache", {"kv_cache_dtype": "int8"}),
    ("A", "bfloat16", {}),
    ("A", "int8 weights", {"quantization": "int8"}),
    ("A", "int4 weights", {"quantization": "int4"}),
    ("B16", "bfloat16", {}),
    ("B16", "int8 weights", {"quantization": "int8"}),
    ("B16", "int4 weights", {"quantization": "int4"}),
)
# A mixture of 0.9 billion weights, and the shape of Gemma 3 1B: the config's class in transformers, and its arguments
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("Qwen3MoeConfig", {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "head_dim": 128,
        "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    }),
    "Gemma 3": ("Gemma3TextConfig", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 8192,
    }),
}  # fmt: skip
TINY_FAMILIES = {"experts": ("qwen3_moe", 1), "Gemma 3": ("gemma3_window", 3)}  # of tests/helpers/tiny_models.py, with layers


def outcomes(setup: Setup) -> Results:
    """Compare every feature with a CPU. `python -m tests.features.devices --lines FILE` keeps what was found."""
    devices: Any = import_module("tests.features.devices")
    features = devices.FEATURES[:1] if setup.is_simulated else devices.FEATURES
    with devices.prepared() as both:
        for feature in features:
            try:
                found = devices.outcome(*both, devices.CPU if setup.is_simulated else devices.GPU, feature)
                yield {"what": feature, "outcome": found}
            except AssertionError as error:
                yield {"what": feature, "passed": False, "text": f"{feature}: {error}"}


def fewer_bits(setup: Setup) -> Results:
    """Output tokens per second with fewer bits, and the ratio to 16 bits, one LLM after the other."""
    cases = FEWER_BITS[:3] if setup.is_simulated else FEWER_BITS
    plain = dict[str, float]()
    for name, what, options in cases:
        [workload] = chosen(setup, name)

        num_runs = 1 if setup.is_simulated or name == "F" else 3
        result = tried(f"{name}, {what}", partial(speed, setup, workload, num_runs, options))
        if "tokens/s" in result:
            plain.setdefault(name, result["tokens/s"])
            result |= {"ratio": result["tokens/s"] / plain[name]} | ({"at least": LEAST_RATIO} if "int8" in what else {})
        yield result


def speed(setup: Setup, workload: Workload, num_runs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Output tokens per second: the median of some runs after one to warm up."""
    with llm_for(setup, [workload], **options) as llm:
        seconds = [generate_s(llm, workload, run) for run in range(1 + num_runs)]
    return {"tokens/s": sum(workload.output_lens) / statistics.median(seconds[1:])}


def tried(what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure, or return the error of a refusal."""
    try:
        return {"what": what} | measure()
    except NanoinferError as error:
        return {"what": what, "text": f"{what}: {error}"}


def families(setup: Setup) -> Results:
    """Decode experts and Gemma 3 with replayed and with eager steps, and answer requests with adapters."""
    for family in MODELS:
        with TemporaryDirectory() as folder:
            write(setup, family, Path(folder))
            yield tried(family, partial(replayed_and_eager, replace(setup, model=folder)))
    sizes = {"rows": 64, "adapters": 8, "rank": 16, "tokens": 64, "rounds": 3}
    if setup.is_simulated:
        sizes = {"rows": 2, "adapters": 1, "rank": 4, "tokens": 2, "rounds": 1}
    engine = {"kv_cache_memory": 2**20, "max_num_batched_tokens": 16, "max_model_len": 28} if setup.is_simulated else {}

    def with_adapters() -> dict[str, Any]:
        dtype = "float32" if setup.is_simulated else "auto"
        times = lora.measure(setup.model, dtype, device=setup.device, **sizes, **engine)
        speeds = {f"{name}, tokens/s": sizes["rows"] * sizes["tokens"] / seconds for name, seconds in times.items()}
        return speeds | {"ratio": times["plain"] / times[f"{sizes['adapters']} adapters"]}

    yield tried("adapters", with_adapters)


def write(setup: Setup, family: str, folder: Path) -> None:
    """Write a checkpoint of a family with random weights."""
    if setup.is_simulated:
        tiny_models: Any = import_module("tests.helpers.tiny_models")
        name, num_layers = TINY_FAMILIES[family]
        tiny_models.save(name, folder, **tiny_models.FEW_HEADS, num_hidden_layers=num_layers)
        return
    config_class, arguments = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**arguments)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def replayed_and_eager(setup: Setup) -> dict[str, Any]:
    """Output tokens per second of one stream and of 16, replayed and eager, and the share of the steps that were replayed."""
    result = dict[str, Any]()
    for workload in chosen(setup, "A,B16"):
        for is_eager in (False, True):
            with llm_for(setup, [workload], enforce_eager=is_eager) as llm, counted_replays() as replayed:
                generate_s(llm, workload, 0)
                seconds = generate_s(llm, workload, 1)
            name = f"{workload.name}{', eager' if is_eager else ''}"
            result[f"{name}, tokens/s"] = sum(workload.output_lens) / seconds
            if not is_eager:
                result[f"{name}, replayed"] = sum(replayed) / len(replayed) if replayed else 0.0
    return result


@contextmanager
def counted_replays() -> Iterator[list[bool]]:
    """List for each forward pass that asks for a graph whether it was replayed."""
    replayed, try_replay = list[bool](), StepGraphs.try_replay

    def noted(graphs: StepGraphs, *step: Any) -> Any:
        hidden = try_replay(graphs, *step)
        replayed.append(hidden is not None)
        return hidden

    with mock.patch.object(StepGraphs, "try_replay", noted):
        yield replayed


def same_bits(setup: Setup) -> Results:
    """Whether log-probabilities alone equal those of a batch, bit by bit, and the speed with batch_invariant and without."""
    [workload] = chosen(setup, "B16")

    def measured(is_invariant: bool) -> dict[str, Any]:
        with llm_for(setup, [workload], batch_invariant=is_invariant) as llm:
            generate_s(llm, workload, 0)
            seconds = generate_s(llm, workload, 1)
            prompts = workload.prompts(llm.info.vocab_size, 2)
            together, alone = scores(llm, prompts), [scores(llm, [prompt])[0] for prompt in prompts]
            num_equal = sum(one == other for one, other in zip(together, alone, strict=True))
            return {"batch_independent": llm.batch_independent, "equal answers": num_equal / len(alone),
                    "tokens/s": sum(workload.output_lens) / seconds}  # fmt: skip

    yield tried("default", partial(measured, False))
    yield tried("batch_invariant", partial(measured, True))


def scores(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    """The log-probabilities of greedy answers."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[one.logprob for place in output.outputs[0].logprobs or [] for one in place.values()] for output in outputs]


def sleep(setup: Setup) -> Results:
    """The free memory before sleep(), during it and after wake_up(), their seconds, and whether answers stay the same."""
    [workload] = chosen(setup, "A")
    gpu = torch.get_device_module(setup.device)

    def measured() -> dict[str, Any]:
        with llm_for(setup, [workload]) as llm:
            prompts = workload.prompts(llm.info.vocab_size, 0)
            before, free = scores(llm, prompts), [gpu.mem_get_info()[0]]
            times = [time.perf_counter()]
            for change in (llm.sleep, llm.wake_up):
                change()
                times.append(time.perf_counter())
                free.append(gpu.mem_get_info()[0])
            return {"MiB free before, asleep, awake": [num // 2**20 for num in free], "sleep, s": times[1] - times[0],
                    "wake_up, s": times[2] - times[1], "equal answers": float(scores(llm, prompts) == before)}  # fmt: skip

    yield tried("sleep", measured)
