"""Decide how many blocks the KV cache gets: the memory that is free after the weights are loaded, less what a step needs.

In: a Runtime and an EngineConfig. Out: an ExecutorInfo.
"""

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.runtime import Runtime
from nanoinfer.scheduling.block_manager import DEFAULT_CPU_MEMORY, most_blocks, most_that_fit
from nanoinfer.system.process import available_cpu_memory, mapped_file_bytes

logger = logging.getLogger(__name__)

LOGITS_COPIES = 12  # fp32 copies of [num_rows, vocab] that a sampler with every parameter may hold. int64 weights count twice


def size_cache(
    runtime: Runtime, config: EngineConfig, *, draft: Runtime | None = None, num_blocks: int | None = None
) -> ExecutorInfo:
    """Decide how many blocks the KV cache gets, and the longest sequence that this allows. Call it after loading weights.

    Args:
        draft: the runtime of a draft model, whose cache is for as many tokens and must fit as well. None: no model drafts.
        num_blocks: the number of blocks of a cache without states. None: as many as fit, the same number on each rank.

    Raises: InvalidValueError if max_model_len is more than the model supports, or no block fits.
    """
    limit, num_state_slots = runtime.model.config.max_position_embeddings, 0
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidValueError(f"max_model_len must be <= {limit}, the positions this model knows, got {config.max_model_len}")
    windows, chunk_size = runtime.sizes.windows, config.scheduler.chunk_grid
    blocks_for = partial(most_blocks, windows=windows, block_size=runtime.block_size, chunk_size=chunk_size)
    if num_blocks is None:
        num_blocks, num_state_slots = _most_that_fit(runtime, config, draft, blocks_for)
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
        windows=windows,
        num_state_slots=num_state_slots,
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


def _most_that_fit(
    runtime: Runtime, config: EngineConfig, draft: Runtime | None, blocks_for: Callable[[int], int]
) -> tuple[int, int]:
    """Return how many blocks and state slots fit, but at most the blocks that max_num_seqs of the longest sequences need.

    blocks_for: returns the most blocks that a sequence holds while it grows to a number of tokens.
    """
    is_gpu, requested, shards = runtime.device.type != "cpu", config.cache.kv_cache_memory, runtime.weights.shards
    step_bytes = peak_step_bytes(runtime, config) if is_gpu else 0
    memory = memory_for_cache(
        runtime.device,
        requested,
        config.cache.gpu_memory_utilization,
        step_bytes=step_bytes,
        lora_bytes=runtime.reserved_bytes,
        num_ranks=1 if shards is None else shards.size,
    )
    block_bytes = runtime.bytes_per_block
    if draft is not None:
        block_bytes += draft.bytes_per_block * runtime.block_size // draft.block_size
    state_bytes, max_num_seqs = runtime.sizes.bytes_per_state, config.scheduler.max_num_seqs
    longest = config.max_model_len or runtime.model.config.max_position_embeddings
    num_blocks, num_state_slots = most_that_fit(memory, block_bytes, state_bytes, max_num_seqs, blocks_for(longest))
    memory, fewest = memory - num_state_slots * state_bytes, blocks_for(1)
    if num_blocks < fewest:
        more = " or gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs" if is_gpu else ""
        if runtime.reserved_bytes:
            more += f", lower max_loras or max_lora_rank (the adapters take {runtime.reserved_bytes} bytes)"
        raise InvalidValueError(
            f"the KV cache may take {memory} bytes, less than one block of {runtime.block_size} tokens "
            f"({fewest * block_bytes} bytes); raise kv_cache_memory{more}, or lower block_size"
        )
    return num_blocks if shards is None else shards.minimum(num_blocks), num_state_slots


def memory_for_cache(
    device: torch.device,
    kv_cache_memory: int | None,
    gpu_memory_utilization: float,
    *,
    step_bytes: int = 0,
    lora_bytes: int = 0,
    num_ranks: int = 1,
) -> int:
    """Return the bytes for this rank's cache: kv_cache_memory, or else the memory that is free. Call it after loading weights.

    Args:
        step_bytes: kept free for a step on a GPU, unless kv_cache_memory is given.
        lora_bytes: kept free for this rank's adapters. On a CPU, mapped weights are kept in memory as well.
        num_ranks: the number of processes that share a CPU's memory.

    Raises: InvalidValueError if kv_cache_memory is more than is free.
    """
    kept_bytes = lora_bytes
    if device.type != "cpu":
        free, total = map(int, torch.get_device_module(device).mem_get_info(device))
        spare = int(total * gpu_memory_utilization) - (total - free) - step_bytes - lora_bytes
        way_out = "lower kv_cache_memory, or leave it out"
    else:
        free = available_cpu_memory()
        kept_bytes += mapped_file_bytes()
        spare = min(DEFAULT_CPU_MEMORY // num_ranks, (free // num_ranks - kept_bytes) // 2)
        way_out = "lower kv_cache_memory, or leave it out to take at most half of what is free"
    free -= kept_bytes
    if kv_cache_memory is None:
        return max(spare, 0)
    if kv_cache_memory > free:
        raise InvalidValueError(f"kv_cache_memory is {kv_cache_memory} bytes, but {free} are free on {device}; {way_out}")
    return kv_cache_memory


class _NoAttention(DenseAttention):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return q.contiguous()


@torch.inference_mode()
def peak_step_bytes(runtime: Runtime, config: EngineConfig) -> int:
    """Return the bytes that the largest step takes on a GPU besides weights and cache, measured with a step without attention.

    The sampler counts as LOGITS_COPIES copies of the logits, plus what its routes reserve. The graphs of decode steps have
    memory of their own: the activations of the largest of them, the block tables of all KV groups, and the padding block.
    """
    num_rows, num_graph_rows, model = config.max_num_rows, runtime.num_graph_rows, runtime.model
    attend, device = _NoAttention(runtime.sizes.state_shapes), runtime.device
    gpu = torch.get_device_module(device)

    def peak_of(num_tokens: int, *, has_head: bool) -> tuple[int, int]:
        """Run a step. Returns the most bytes that it takes, and the bytes of the logits in fp32."""
        gpu.reset_peak_memory_stats(device)
        before = gpu.memory_allocated(device)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        hidden = model(ids, ids, attend)
        logits_bytes = model.compute_logits(hidden[:num_rows]).float().nbytes if has_head else 0
        return gpu.max_memory_allocated(device) - before, logits_bytes

    needed, logits_bytes = peak_of(config.scheduler.max_num_batched_tokens + num_rows, has_head=True)
    needed += LOGITS_COPIES * logits_bytes + sum(route.reserved_bytes(logits_bytes) for route in runtime.routes)
    if num_graph_rows:
        longest = min(config.max_model_len or sys.maxsize, model.config.max_position_embeddings)
        num_entries = num_graph_rows * len(runtime.sizes.groups) * -(-longest // runtime.block_size)
        needed += peak_of(num_graph_rows, has_head=False)[0] + num_entries * torch.int32.itemsize + runtime.bytes_per_block
    gpu.empty_cache()
    return int(needed)
