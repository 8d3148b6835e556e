"""The bandwidth of single kernels, compared with that of a copy in the same run. The variants of a kernel take turns."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch.nn import functional

from benchmarks.device.parts import Results, Setup
from nanoinfer.attention.base import find_backend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.fast.cuda.linear_kernel import few_rows_linear
from nanoinfer.fast.sampling.few_logits import sample_on_gpu
from nanoinfer.loading import devices, loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.sampling.batch import ParameterColumns

COLD_BYTES = 2**28  # more than a GPU's cache holds: so much is read before the same memory is read again

Variants = dict[str, Callable[[], object]]
Case = tuple[str, int, int, Variants]  # what, the bytes of a launch, the launches of a run, and the runs


@torch.inference_mode()
def bandwidths(setup: Setup) -> Results:
    """Yield the microseconds of each kernel, and its bytes per second as a share of a copy's, which reads and writes."""
    device = torch.device(setup.device, 0)
    dtype = torch.bfloat16 if not setup.is_simulated and devices.gpu_has_bf16(device) else torch.float16
    cold = 1 if setup.is_simulated else COLD_BYTES
    source = torch.zeros(4 * cold, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(setup, {"copy": lambda: target.copy_(source)})["copy"]
    yield {"what": "copy", "GB/s": copied / 1e9}
    config = loader.on_meta(Checkpoint.open(setup.model))[0].config
    sizes = ((2, 5),) if setup.is_simulated else tuple((rows, length) for rows in (64, 256) for length in (128, 1000))
    cases = (
        linears(config, dtype, device, cold),
        attention(config, dtype, device, cold, sizes),
        draws(config, dtype, device, tuple(dict.fromkeys(rows for rows, _ in sizes))),
    )
    for what, num_bytes, num_launches, variants in chain(*cases):
        result: dict[str, Any] = {"what": what}
        for name, seconds in seconds_of(setup, variants).items():
            share = num_bytes * num_launches / seconds / copied
            result |= {f"{name}, us": 1e6 * seconds / num_launches, f"{name}, of the copy": share}
        yield result


def seconds_of(setup: Setup, variants: Variants) -> dict[str, float]:
    """Return the median seconds of a replay of each variant's graph, interleaved."""
    gpu, replays, seconds = torch.get_device_module(setup.device), dict[str, Any](), dict[str, list[float]]()
    for name, run in variants.items():
        run()  # compiles
        gpu.synchronize()
        graph = gpu.CUDAGraph()
        with gpu.graph(graph, capture_error_mode="thread_local"):
            run()
        replays[name], seconds[name] = graph.replay, []
    for _ in range(1 if setup.is_simulated else 7):
        for name, replay in replays.items():
            start, end = (gpu.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            gpu.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in seconds.items()}


def for_each(launch: Callable[[Any], object], items: Iterable[Any]) -> Callable[[], object]:
    return lambda: [launch(item) for item in items]


def linears(config: Any, dtype: torch.dtype, device: torch.device, cold: int) -> Iterator[Case]:
    """The linear layers of the model in steps of few rows, by the kernel and by torch. gate and up are without the gate."""
    heads = config.num_attention_heads * config.head_dim
    with_kv = heads + 2 * config.num_key_value_heads * config.head_dim
    size, inner = config.hidden_size, config.intermediate_size
    shapes = {"qkv": (size, with_kv), "o": (heads, size), "gate and up": (size, 2 * inner), "down": (inner, size),
              "head": (size, config.vocab_size)}  # fmt: skip
    for name, (num_in, num_out) in shapes.items():
        num_bytes = num_in * num_out * dtype.itemsize
        weights = [torch.zeros(num_out, num_in, dtype=dtype, device=device) for _ in range(-(-cold // num_bytes))]
        for rows in (1, 16):
            x = torch.zeros(rows, num_in, dtype=dtype, device=device)
            kernels = {"kernel": partial(few_rows_linear, x, bias=None), "torch": partial(functional.linear, x)}
            variants = {name: for_each(kernel, weights) for name, kernel in kernels.items()}
            yield f"{name}, {rows} rows", num_bytes, len(weights), variants


def attention(
    config: Any, dtype: torch.dtype, device: torch.device, cold: int, sizes: tuple[tuple[int, int], ...]
) -> Iterator[Case]:
    """A decode step of sequences of a length, with the new keys and values, by each backend that runs here."""
    cases: Any = import_module("tests.helpers.paged_cases")
    for rows, length in sizes:
        num_bytes = 2 * rows * length * config.num_key_value_heads * config.head_dim * dtype.itemsize
        num_layers, variants = -(-cold // num_bytes), Variants()
        for name in ("triton", "flash"):
            backend_class, _ = find_backend(name, device, dtype, config.head_dim, None)
            if backend_class is None:
                continue
            backend = backend_class(enforce_eager=False)
            size = backend.default_block_size
            num_blocks = rows * -(-length // size)
            cache = KVCache(
                num_layers=num_layers, num_blocks=num_blocks, block_size=size, num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim, dtype=dtype, device=device, layout=backend.layout,
            )  # fmt: skip
            metadata = cases.metadata_for([(length - 1, 1)] * rows, size, num_blocks, torch.Generator().manual_seed(0), device)
            attend = backend.begin_step(cache, cases.replaced(metadata, block_tables=metadata.block_tables.int()))
            q, k, v = (
                torch.zeros(rows, heads, config.head_dim, dtype=dtype, device=device)
                for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)
            )
            variants[name] = for_each(partial(attend, q=q, k=k, v=v), range(num_layers))
        yield f"attention, {rows} x {length}", num_bytes, num_layers, variants


def draws(config: Any, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> Iterator[Case]:
    """The draw from random logits. Its bytes are those of the logits, read once."""
    for rows in sizes:
        logits = torch.randn(rows, config.vocab_size).to(dtype).to(device)
        u, top_p = (torch.full((rows,), value, dtype=torch.float64, device=device) for value in (0.5, 0.9))
        temperature = torch.full((rows,), 0.6, device=device)
        top_k = torch.full((rows,), min(40, config.vocab_size), device=device)
        plain = ParameterColumns(temperature=temperature)
        few = replace(plain, top_k=top_k, top_p=top_p)
        variants: Variants = {
            "temperature": partial(sample_on_gpu, logits, plain, u),
            "top_k and top_p": partial(sample_on_gpu, logits, few, u),
        }
        yield f"draw, {rows} rows", logits.nbytes, 1, variants
