"""Parts -> what LocalExecutor runs: the sizes of the KV cache, the runner with its cache, the sampler. One function each.

In: Parts and an EngineConfig. Out: ExecutorInfo, ModelRunner, Sampler.
"""

import logging
from collections.abc import Callable

from nanoinfer.attention.kv_cache import KVCache, bytes_per_block_of
from nanoinfer.config import LOGPROBS_MODES, EngineConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.memory import memory_for_cache, peak_step_bytes
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.parts import Parts
from nanoinfer.sampling.sampler import STAGES, Sampler

logger = logging.getLogger(__name__)


def size_cache(
    parts: Parts,
    config: EngineConfig,
    *,
    draft: Parts | None = None,
    num_processes: int = 1,
    minimum: Callable[[int], int] = int,
) -> ExecutorInfo:
    """Decide how many blocks the KV cache gets, and the longest sequence that this allows. Call it after loading weights.

    It gets the blocks that fit into memory, at most what max_num_seqs of the longest sequences could use.

    Args:
        parts: the model's.
        config: the memory settings.
        draft: of a draft model, whose cache gets as many blocks and must fit into the memory as well.
        num_processes: how many processes of this engine share the memory of a CPU, each with a cache.
        minimum: of the numbers of blocks of these processes, given this one's. By default the number itself.

    Raises:
        InvalidValueError: max_model_len is more than the model supports, or no block fits.
    """
    limit = parts.model.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidValueError(f"max_model_len must be <= {limit}, the positions this model knows, got {config.max_model_len}")
    is_cuda, requested = parts.device.type == "cuda", config.cache.kv_cache_memory
    step_bytes = peak_step_bytes(parts.model, config, parts.device, parts.routes) if is_cuda else 0
    memory = memory_for_cache(parts.device, requested, config.cache.gpu_memory_utilization, step_bytes=step_bytes)
    if not is_cuda and requested is None:
        memory //= num_processes  # each of them sees the same free memory
    block_bytes = _block_bytes(parts) + (0 if draft is None else _block_bytes(draft))
    max_blocks = config.scheduler.max_num_seqs * -(-(config.max_model_len or limit) // parts.block_size)
    if (num_blocks := min(memory // block_bytes, max_blocks)) < 1:
        more = " or gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs" if is_cuda else ""
        raise InvalidValueError(
            f"the KV cache may take {memory} bytes, less than one block of {parts.block_size} tokens ({block_bytes} bytes); "
            f"raise kv_cache_memory{more}, or lower block_size"
        )
    info = describe_cache(parts, config, minimum(num_blocks))
    if config.max_model_len is not None and info.max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d, not %d: the KV cache holds no more; raise kv_cache_memory",
            info.max_model_len, config.max_model_len,
        )  # fmt: skip
    return info


def describe_cache(parts: Parts, config: EngineConfig, num_blocks: int) -> ExecutorInfo:
    """Collect and log what the engine must know about a model with a cache of this many blocks."""
    limit = parts.model.config.max_position_embeddings
    max_model_len = min(config.max_model_len or limit, num_blocks * parts.block_size)
    info = ExecutorInfo(
        vocab_size=parts.model.config.vocab_size,
        max_position_embeddings=limit,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=parts.block_size,
        num_cache_bytes=num_blocks * _block_bytes(parts),
        device=str(parts.device),
        dtype=str(parts.dtype).removeprefix("torch."),
        attention_backend=parts.backend_name,
    )
    logger.info(
        "%s on %s, attention %s, KV cache of %d blocks of %d tokens (%.0f MiB), max_model_len %d",
        info.dtype, info.device, info.attention_backend, num_blocks, info.block_size,
        info.num_cache_bytes / 2**20, max_model_len,
    )  # fmt: skip
    return info


def make_runner(parts: Parts, info: ExecutorInfo) -> ModelRunner:
    """Allocate the KV cache, and make the runner of the model with it."""
    graphs = None if parts.make_decode_graphs is None else parts.make_decode_graphs(info)
    config = parts.model.config
    cache = KVCache(
        num_layers=config.num_hidden_layers,
        num_blocks=info.num_blocks + (graphs is not None),
        block_size=info.block_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=parts.dtype,
        device=parts.device,
        layout=parts.backend.layout,
    )
    return parts.runner_class(parts.model, cache, parts.backend, graphs)


def make_sampler(parts: Parts, config: EngineConfig) -> Sampler:
    return Sampler(
        STAGES if config.stages is None else config.stages,
        routes=parts.routes,
        processed_logprobs=LOGPROBS_MODES[config.logprobs_mode] == "processed",
    )


def check_invariance(parts: Parts, config: EngineConfig) -> None:
    """Raises: UnsupportedError, if batch_invariant=True needs what the parts do not promise."""
    if config.scheduler.batch_invariant and not parts.is_batch_independent:
        why = "enforce_eager=True uses torch's products, whose bits do" if config.enforce_eager else "this machine's do"
        raise UnsupportedError(
            f"batch_invariant=True requires rows whose bits do not depend on the batch; {why}, for this model in "
            f"{str(parts.dtype).removeprefix('torch.')} on {parts.device.type}; leave it out, or use a CPU with a C++ compiler"
        )


def _block_bytes(parts: Parts) -> int:
    """Bytes of a cache block of a model in all layers."""
    return bytes_per_block_of(parts.model.config, parts.block_size, parts.dtype)
