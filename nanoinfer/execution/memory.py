"""Decide how many blocks the KV cache gets: the memory that is free after the weights are loaded, less what a step needs.

In: a Runtime and an EngineConfig. Out: an ExecutorInfo.
"""

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import torch

from nanoinfer.attention.cache_sizes import DEFAULT_CPU_MEMORY
from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.runtime import GRAPH_CHUNKS, Runtime
from nanoinfer.sampling.sampler import PART_BYTES
from nanoinfer.system.process import available_cpu_memory, mapped_file_bytes

logger = logging.getLogger(__name__)

GRAPHS_SHARE = 8  # the cache gets at least so many times the memory of the graphs, or steps with many prompt tokens run eagerly
LOGITS_COPIES = 4  # the fp32 copies of [num_rows, vocab] in a step: the model's, those for log-probabilities, a stage's two
PART_COPIES = 18  # what a stage or the draw takes besides, as copies of the logits that sampler.in_parts gives them at a time


def size_cache(runtime: Runtime, config: EngineConfig, *, num_blocks: int | None = None) -> ExecutorInfo:
    """Decide how many blocks the KV cache gets, and the longest sequence that this allows. Call it after loading weights.

    num_blocks: the number of blocks of a cache without states. None: as many as fit, the same number on each rank.

    Raises: InvalidValueError if max_model_len is more than the model supports, or no block fits.
    """
    limit, num_state_slots = runtime.model.config.max_position_embeddings, 0
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidValueError(f"max_model_len must be <= {limit}, the positions this model knows, got {config.max_model_len}")
    chunk_size = config.scheduler.chunk_grid
    blocks_for = partial(runtime.sizes.num_blocks_for, block_size=runtime.block_size, chunk_size=chunk_size)
    if num_blocks is not None:
        num_graph_tokens, graph_bytes = 0, peak_graph_bytes(runtime, config, 0)
    else:
        step_bytes = 0 if runtime.device.type == "cpu" else peak_step_bytes(runtime, config) + runtime.kept_step_bytes
        num_graph_tokens, graph_bytes = _graphs_that_fit(runtime, config, step_bytes)
        num_blocks, num_state_slots = _most_that_fit(runtime, config, step_bytes + graph_bytes, blocks_for)
    lengths = range(1, min(config.max_model_len or limit, limit) + 1)
    info = ExecutorInfo(
        vocab_size=runtime.model.config.vocab_size,
        max_position_embeddings=limit,
        max_model_len=bisect_right(lengths, num_blocks, key=blocks_for),
        num_blocks=num_blocks,
        block_size=runtime.block_size,
        num_cache_bytes=num_blocks * runtime.bytes_per_block + num_state_slots * runtime.sizes.bytes_per_state,
        device=str(runtime.device),
        dtype=str(runtime.dtype).removeprefix("torch."),
        attention_backend=runtime.backend_name,
        windows=runtime.sizes.windows,
        num_state_slots=num_state_slots,
        num_graph_tokens=num_graph_tokens,
        num_graph_bytes=graph_bytes,
    )
    logger.info(
        "%s on %s, attention %s, KV cache of %d blocks of %d tokens (%.0f MiB), max_model_len %d",
        info.dtype, info.device, info.attention_backend, num_blocks, info.block_size,
        info.num_cache_bytes / 2**20, info.max_model_len,
    )  # fmt: skip
    if config.max_model_len is not None and info.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d, not %d: the KV cache holds no more; raise kv_cache_memory",
            info.max_model_len, config.max_model_len,
        )  # fmt: skip
    return info


def _graphs_that_fit(runtime: Runtime, config: EngineConfig, step_bytes: int) -> tuple[int, int]:
    """Return num_graph_tokens and num_graph_bytes of ExecutorInfo: an estimate, which LocalExecutor checks when it captures."""
    shards = runtime.weights.shards
    for num_tokens in reversed(runtime.prompt_graph_sizes):
        taken = peak_graph_bytes(runtime, config, num_tokens)
        memory = _memory_for(None, runtime, config, step_bytes + taken)
        fits = memory >= (config.cache.kv_cache_memory or GRAPHS_SHARE * taken)
        if fits if shards is None else shards.minimum(fits):  # all ranks pad a step alike
            return num_tokens, taken
    return 0, peak_graph_bytes(runtime, config, 0)


def _memory_for(requested: int | None, runtime: Runtime, config: EngineConfig, step_bytes: int) -> int:
    """Return memory_for_cache for this runtime. requested: kv_cache_memory. None: all that is free."""
    shards = runtime.weights.shards
    return memory_for_cache(
        runtime.device,
        requested,
        config.cache.gpu_memory_utilization,
        step_bytes=step_bytes,
        reserved_bytes=runtime.reserved_bytes,
        num_ranks=1 if shards is None else shards.size,
    )


def _most_that_fit(
    runtime: Runtime, config: EngineConfig, step_bytes: int, blocks_for: Callable[[int], int]
) -> tuple[int, int]:
    """Return how many blocks and state slots fit, but at most the blocks that max_num_seqs of the longest sequences need.

    step_bytes: kept free for a step and the graphs on a GPU.
    blocks_for: returns the most blocks that a sequence holds while it grows to a number of tokens.
    """
    is_gpu, shards = runtime.device.type != "cpu", runtime.weights.shards
    memory = _memory_for(config.cache.kv_cache_memory, runtime, config, step_bytes)
    block_bytes = runtime.bytes_per_block + runtime.block_size * runtime.kept_bytes_per_token
    state_bytes, max_num_seqs = runtime.sizes.bytes_per_state, config.scheduler.max_num_seqs
    longest = config.max_model_len or runtime.model.config.max_position_embeddings
    num_state_slots = runtime.sizes.num_states_in(memory, max_num_seqs)
    memory, fewest = memory - num_state_slots * state_bytes, blocks_for(1)
    num_blocks = min(memory // block_bytes, max_num_seqs * blocks_for(longest))
    if num_blocks < fewest:
        more = " or gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs" if is_gpu else ""
        raise InvalidValueError(
            f"the KV cache may take {memory} bytes, less than one block of {runtime.block_size} tokens "
            f"({fewest * block_bytes} bytes); raise kv_cache_memory{more}{runtime.reserved_hint}, or lower block_size"
        )
    return num_blocks if shards is None else shards.minimum(num_blocks), num_state_slots


def memory_for_cache(
    device: torch.device,
    kv_cache_memory: int | None,
    gpu_memory_utilization: float,
    *,
    step_bytes: int = 0,
    reserved_bytes: int = 0,
    num_ranks: int = 1,
) -> int:
    """Return the bytes for this rank's cache: kv_cache_memory, or else the memory that is free. Call it after loading weights.

    Args:
        step_bytes: kept free for a step on a GPU, unless kv_cache_memory is given.
        reserved_bytes: kept free for this rank, as in Runtime. On a CPU, mapped weights are kept in memory as well.
        num_ranks: the number of processes that share a CPU's memory.

    Raises: InvalidValueError if kv_cache_memory is more than is free.
    """
    kept_bytes = reserved_bytes
    if device.type != "cpu":
        free, total = map(int, torch.get_device_module(device).mem_get_info(device))
        spare = int(total * gpu_memory_utilization) - (total - free) - step_bytes - reserved_bytes
        hint = "lower kv_cache_memory, or leave it out"
    else:
        free = available_cpu_memory()
        kept_bytes += mapped_file_bytes()
        spare = min(DEFAULT_CPU_MEMORY // num_ranks, (free // num_ranks - kept_bytes) // 2)
        hint = "lower kv_cache_memory, or leave it out to take at most half of what is free"
    free -= kept_bytes
    if kv_cache_memory is None:
        return max(spare, 0)
    if kv_cache_memory > free:
        raise InvalidValueError(f"kv_cache_memory is {kv_cache_memory} bytes, but {free} are free on {device}; {hint}")
    return kv_cache_memory


def peak_step_bytes(runtime: Runtime, config: EngineConfig) -> int:
    """Return the bytes that the largest step takes on a GPU besides weights, cache and graphs.

    The sampler counts as copies of the logits, plus what its routes reserve.
    """
    num_tokens = config.scheduler.max_num_batched_tokens + config.max_num_rows
    peak, _, logits_bytes = _measure(runtime, num_tokens, config.max_num_rows)
    sampler_bytes = LOGITS_COPIES * logits_bytes + PART_COPIES * min(logits_bytes, PART_BYTES)
    return peak + sampler_bytes + sum(route.reserved_bytes(logits_bytes) for route in runtime.routes)


def peak_graph_bytes(runtime: Runtime, config: EngineConfig, num_prompt_tokens: int) -> int:
    """Return the bytes that the graphs of steps with at most so many prompt tokens take.

    These are the activations of the largest step, whose memory all graphs share, its hidden rows, which replays fill, its
    inputs with the block tables of all KV groups, and the padding block.
    """
    if not (num_rows := runtime.num_graph_rows):
        return 0
    longest: int = min(config.max_model_len or sys.maxsize, runtime.model.config.max_position_embeddings)
    num_seqs, num_tokens = num_rows + GRAPH_CHUNKS * (num_prompt_tokens > 0), num_rows + num_prompt_tokens
    num_groups, max_blocks = len(runtime.sizes.windows), -(-longest // runtime.block_size)
    table_bytes = num_groups * num_seqs * max_blocks * torch.int32.itemsize
    input_bytes = ((2 + num_groups) * num_tokens + num_seqs) * torch.int64.itemsize
    peak, hidden_bytes, _ = _measure(runtime, num_tokens)
    return peak + hidden_bytes + table_bytes + input_bytes + runtime.bytes_per_block


@torch.inference_mode()
def _measure(runtime: Runtime, num_tokens: int, num_rows: int = 0) -> tuple[int, int, int]:
    """Run a step without attention. Returns the most bytes that it takes, and the bytes of the hidden rows and of the logits.

    num_rows: the rows whose logits are computed, in fp32.
    """
    model, device = runtime.model, runtime.device
    gpu = torch.get_device_module(device)
    gpu.reset_peak_memory_stats(device)
    before = gpu.memory_allocated(device)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    hidden = model(ids, ids, runtime.no_attention())
    logits_bytes = model.compute_logits(hidden[:num_rows]).float().nbytes if num_rows else 0
    peak = int(gpu.max_memory_allocated(device) - before)
    gpu.empty_cache()
    return peak, hidden.nbytes, logits_bytes


def describe_graphs(runtime: Runtime, num_graph_tokens: int) -> str:
    """Describe which steps are captured as CUDA graphs, and why others are not. num_graph_tokens: as in ExecutorInfo."""
    attention, sizes = f"the attention backend {runtime.backend_name}", runtime.prompt_graph_sizes
    if not runtime.num_graph_rows:
        return f"none: {attention}, the model or several GPUs need the host during a step"
    steps = f"steps of up to {runtime.num_graph_rows} decodes and {num_graph_tokens} prompt tokens"
    why = f"the memory is too small for {sizes[-1]}" if sizes else f"{attention} supports no others"
    return steps if num_graph_tokens in sizes[-1:] else f"{steps}: {why}"
