"""The roofline: this machine's limits, the work that a step must do, and how close the step comes to the limits.

A part of a phase takes at least max(bytes / bandwidth, operations / rate). A phase takes at least the sum over its parts.
Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model", https://doi.org/10.1145/1498765.1498785
"""

import statistics
import timeit
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.attention.cache_sizes import LayerSizes
from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.memory import memory_for_cache
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.features.tracing import Recorder, StepScheduled, StepTimed
from nanoinfer.llm import LLM
from nanoinfer.loading import devices, loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.sampling_params import SamplingParams
from nanoinfer_lab.bench.timing import RequestTiming
from nanoinfer_lab.simulate.costs import ModelSizes, StepPart, work_of

READ_BYTES = {"cpu": 2**30, "cuda": 2**32}  # larger than any cache, and long enough to be timed
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
# (number of sequences, tokens of each) in the measured steps. The first is a prefill, the others decode.
STEPS = {
    "cpu": ((1, 1023), (1, 128), (16, 128), (64, 128), (16, 900)),
    "cuda": ((1, 1023), (1, 128), (16, 900), (64, 900), (256, 1000)),
}
CACHE_SHARE = 0.6  # of a GPU's memory. Weights, steps and READ_BYTES need the rest
NUM_STEPS = 16  # the number of decode steps, of which the median counts


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's limits. bandwidth: bytes per second read from memory. gemm_rates: dtype -> GEMM operations per second."""

    bandwidth: float
    gemm_rates: dict[torch.dtype, float]


@dataclass(frozen=True, slots=True)
class Phase:
    """A kind of step."""

    name: str
    num_decoding: int  # how many sequences get their next token. 0: the step computes a prompt
    parts: tuple[StepPart, ...]
    measured_s: float  # the seconds of such a step

    @property
    def num_operations(self) -> int:
        return sum(part.num_operations for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def least_s(self, machine: Machine, dtype: torch.dtype) -> float:
        return sum(part.seconds(machine.bandwidth, machine.gemm_rates[dtype]) for part in self.parts)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure the bandwidth and the GEMM rates, each as the best of ten.

    The rates are those of square matrix products of GEMM_SIZE, or of a quarter of it if that is faster, because a cache
    holds it. torch computes them, or on a CPU the engine's kernel if it is faster.
    dtype: a dtype to measure besides fp32 and bf16.
    """
    size = GEMM_SIZE[device.type]
    kinds = dict.fromkeys((torch.float32, torch.bfloat16, dtype))
    rates = {kind: max(_gemm_rate(one, kind, device) for one in (size, size // 4)) for kind in kinds}
    return Machine(measure_bandwidth(device), rates)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a sum over READ_BYTES reads from memory, as the best of ten."""
    data = torch.ones(READ_BYTES[device.type] // 8, dtype=torch.int64, device=device)
    return data.nbytes / _best_s(data.sum, device)


def _gemm_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    layers: list[nn.Module] = [nn.Linear(size, size, bias=False, dtype=dtype, device=device)]
    if device.type == "cpu":
        from nanoinfer.fast.cpu.accelerate import compile_model

        with suppress(UnsupportedError):  # there is no compiler, or no kernel for this dtype
            layers.append(compile_model(nn.Sequential(nn.Linear(size, size, bias=False, dtype=dtype))).model)
    x = torch.ones(size, size, dtype=dtype, device=device)
    with torch.inference_mode():
        return max(2 * size**3 / _best_s(partial(layer, x), device) for layer in layers)


def count(
    model: Any, dtype: torch.dtype, *, num_seqs: int, num_new: int, context: int, weight_bits: int | None = None
) -> tuple[StepPart, ...]:
    """Count the bytes and operations of a step's parts, as ModelSizes.parts does.

    Args:
        model: a model on the meta device.
        dtype: the dtype of weights and cache.
        num_seqs: the number of sequences in the step.
        num_new: the number of new tokens per sequence.
        context: the number of tokens that the last new token of a sequence sees.
        weight_bits: the bits of the linear layers' weights. None: they are not quantised.
    """
    sizes = sizes_of(model)
    return sizes.parts(work_of(sizes, [(num_new, context)] * num_seqs), dtype, weight_bits=weight_bits)


def sizes_of(model: Any) -> ModelSizes:
    """Count a model's weights by the names of its modules. ModelSizes.of reads the same from config.json."""
    config = model.config
    weights = {"attention": 0, "MLP": 0, "experts": 0, "tables": 0}
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        if any(part in name for part in (".attn.", ".self_attn.", ".linear_attn.")):
            weights["attention"] += weight.numel()
        else:
            kind = "experts" if ".experts." in name else "MLP" if ".mlp." in name else "tables"
            weights[kind] += weight.numel()
    return ModelSizes(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        attention_weights=weights["attention"],
        mlp_weights=weights["MLP"],
        expert_weights=weights["experts"],
        num_experts=config.num_experts if weights["experts"] else 1,
        num_experts_per_tok=config.num_experts_per_tok if weights["experts"] else 1,
        table_weights=weights["tables"],
        cache=HybridSizes.of(config),
    )


def cache_bytes(config: LayerSizes, dtype: torch.dtype, num_tokens: list[int]) -> int:
    """Return the bytes of a KV cache for the largest sequences that run at once. num_tokens: the length of each sequence."""
    block, sizes = 256, HybridSizes.of(config)  # in tokens, a multiple of every backend's block size
    largest = sorted(num_tokens, reverse=True)[: SchedulerConfig.max_num_seqs]
    num_blocks = len(sizes.groups) * sum(-(-tokens // block) for tokens in largest)
    blocks = num_blocks * sizes.bytes_per_block(block, dtype)
    states = 2 * len(largest) * sizes.bytes_per_state  # each has a checkpoint
    return states + max(blocks, states)  # states get at most half


def least_s_of_run(
    timings: list[RequestTiming], machine: Machine, model: Any, dtype: torch.dtype, weight_bits: int | None = None
) -> float:
    """Return the least seconds of a run's steps: each reads the weights once, and computes the tokens that it returned.

    A prompt counts in the step of its first token.
    """
    steps: dict[float, list[tuple[int, int]]] = defaultdict(list)  # each sequence's new tokens and its context
    for timing in timings:
        for i, time_of_token in enumerate(timing.token_times):
            num_prompt = timing.num_prompt_tokens
            steps[time_of_token].append((1 if i else num_prompt, num_prompt + i))
    sizes, rate = sizes_of(model), machine.gemm_rates[dtype]
    parts = (sizes.parts(work_of(sizes, step), dtype, weight_bits=weight_bits) for step in steps.values())
    return sum(part.seconds(machine.bandwidth, rate) for part in chain.from_iterable(parts))


def run(checkpoint: str | None, **engine: Any) -> tuple[Machine, torch.dtype, list[Phase]]:
    """Measure the machine, then prefill and decode steps of a model, without those whose cache a GPU has no memory for.

    engine: arguments of LLM, including dtype and device.
    """
    recorder = Recorder()
    opened, device = Checkpoint.open(checkpoint), devices.resolve_device(engine["device"])
    model, dtype = loader.on_meta(opened)[0], devices.resolve_dtype(engine["dtype"], opened, device)
    # The cache is only as large as these steps need, because the first touch of more memory would be measured, too.
    needed = {
        (n, length): cache_bytes(model.config, dtype, [length + num_steps(n, length) + 2] * n)
        for n, length in STEPS[device.type]
    }
    if device.type != "cpu":
        available = memory_for_cache(device, None, CACHE_SHARE)
        needed = {step: num_bytes for step, num_bytes in needed.items() if num_bytes <= available}
    # Not async, so that a step's time covers only its own work.
    engine |= {"async_scheduling": False, "skip_tokenizer_init": True}
    llm = LLM(checkpoint, tracer=recorder, kv_cache_memory=max(needed.values()), **engine)
    machine = measure_machine(device, dtype)
    phases = []
    for i, (num_seqs, max_length) in enumerate(needed):
        length = min(max_length, llm.engine.max_model_len - num_steps(num_seqs, max_length) - 2)
        prefill_s, decode_s = _measure(llm, recorder, num_seqs, length)
        if i == 0:
            parts = count(model, dtype, num_seqs=1, num_new=length, context=length)
            phases.append(Phase(f"prefill of {length}", 0, parts, prefill_s))
        else:
            parts = count(model, dtype, num_seqs=num_seqs, num_new=1, context=length + num_steps(num_seqs, length) // 2)
            phases.append(Phase(f"decode, {num_seqs} x {length}", num_seqs, parts, decode_s))
    return machine, dtype, phases


def _measure(llm: LLM, recorder: Recorder, num_seqs: int, length: int) -> tuple[float, float]:
    """Return the seconds of a prefill and a decode step, with the bookkeeping around the model, in the second of two runs."""
    params = SamplingParams(temperature=0, max_tokens=num_steps(num_seqs, length) + 1, ignore_eos=True, detokenize=False)
    for run in range(2):
        generator = torch.Generator().manual_seed(run)
        prompts = torch.randint(llm.info.vocab_size, (num_seqs, length), generator=generator).tolist()
        recorder.events.clear()
        llm.generate(prompts, params, use_tqdm=False)
    seconds: list[float] = []
    decodes = []  # the seconds of the steps in which all sequences decode
    for event in recorder.events:
        if isinstance(event, StepScheduled):
            decodes_all = event.num_new_tokens == (1,) * num_seqs
        elif isinstance(event, StepTimed):
            seconds.append(event.outside_model_and_sampler + event.forward + event.sample)
            decodes += seconds[-1:] if decodes_all else []
    return seconds[0], statistics.median(decodes)


def num_steps(num_seqs: int, length: int) -> int:
    """Return the number of decode steps after which NUM_STEPS decoded all sequences: prompts may start some steps apart."""
    return NUM_STEPS + -(-num_seqs * length // SchedulerConfig.max_num_batched_tokens)


def _best_s(function: Callable[[], Tensor], device: torch.device) -> float:
    def call() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return min(timeit.repeat(call, number=1, repeat=12)[2:])
