"""The engine's settings, split by owner. Frozen and checked: derived values are returned, never written back.

In: the arguments of LLM. Out: values that are valid by themselves. What depends on the model or on the machine (max_model_len,
the number of blocks) is computed in execution/uniproc_executor.py and execution/memory.py.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_flag,
    check_integer,
    check_number,
)

if TYPE_CHECKING:
    from nanoinfer.sampling.sampler import Stage
    from nanoinfer.tracing import Tracer

DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}  # vLLM's spellings -> torch's


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Settings of the paged KV cache.

    Args:
        block_size: Tokens per block. None is the attention backend's own.
        kv_cache_memory: Bytes for the cache on any device. None computes it (see execution/memory.py).
        gpu_memory_utilization: Share of a GPU's memory for weights and cache together, in (0, 1]. Used on CUDA only.
        enable_prefix_caching: Keep finished blocks, and reuse them for prompts that begin with the same tokens.
    """

    block_size: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 1, None, ">= 1", or_none=True)
        check_integer("kv_cache_memory", self.kv_cache_memory, 1, None, ">= 1", or_none=True)
        # The range is open at 0, so the lower bound is the smallest number above it.
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, math.ulp(0.0), 1.0, "in (0, 1]")
        check_flag("enable_prefix_caching", self.enable_prefix_caching)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much runs in one step.

    Args:
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum number of prompt tokens per step. Every running decode adds its one token.
        chunk_size: Prompts are cut at absolute multiples of this (and of max_num_batched_tokens, if that is smaller).
        batch_invariant: Attend with one query at a time, so that a token's bits depend on the tokens before it alone, and on
            no chunk, prefix hit or preemption.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    chunk_size: int = 1024
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, None, ">= 1")
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, None, ">= 1")
        check_integer("chunk_size", self.chunk_size, 1, None, ">= 1")
        check_flag("batch_invariant", self.batch_invariant)

    @property
    def chunk_grid(self) -> int:
        """The number of tokens at whose multiples prompts are cut. A chunk always fits an otherwise empty step."""
        return min(self.chunk_size, self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What engine/factory.load_engine needs: the model, the device, and the settings of the parts."""

    model: str | None = None  # a folder, a hub name, the name of a bundled model. None: the bundled default
    tokenizer: str | None = None  # a folder or hub name. None: the model's own
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None  # or "int8": linear layers in 8 bits
    device: str = "auto"
    max_model_len: int | None = None  # tokens of prompt + output. None: the model's own
    attention_backend: str = "auto"
    enforce_eager: bool = False
    async_scheduling: bool | None = None  # launch a step before the previous one is read. None: on a GPU
    seed: int = 0
    tracer: "Tracer | None" = None
    stages: "tuple[Stage, ...] | None" = None  # the sampler's. None: sampling.sampler.STAGES
    logprobs_mode: str = "raw"  # or "processed": after all stages
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidTypeError(f"{name} must be a string, got {value!r}")
        for name in ("dtype", "device", "attention_backend"):
            if not isinstance(getattr(self, name), str):
                raise InvalidTypeError(f"{name} must be a string, got {getattr(self, name)!r}")
        if self.dtype not in DTYPES:
            raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.quantization not in (None, "int8"):
            raise InvalidValueError(f"quantization must be None or 'int8', got {self.quantization!r}")
        if self.quantization is not None and DTYPES[self.dtype] not in ("auto", "bfloat16"):
            raise InvalidValueError(f"quantization='int8' computes in bfloat16, got dtype={self.dtype!r}; leave dtype out")
        check_integer("max_model_len", self.max_model_len, 1, None, ">= 1", or_none=True)
        check_flag("enforce_eager", self.enforce_eager)
        if self.async_scheduling is not None:
            check_flag("async_scheduling", self.async_scheduling)
        check_integer("seed", self.seed, 0, 2**64 - 1, "in 0 .. 2**64 - 1")
        if self.logprobs_mode not in ("raw", "processed"):
            raise InvalidValueError(f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}")
        if self.stages is not None and not (isinstance(self.stages, tuple) and all(callable(stage) for stage in self.stages)):
            raise InvalidTypeError(f"stages must be a list of functions (logits, SamplingBatch) -> logits, got {self.stages!r}")
        if isinstance(self.tracer, type) or (self.tracer is not None and not callable(getattr(self.tracer, "emit", None))):
            raise InvalidTypeError(f"tracer must have a method emit(event), got {self.tracer!r}; see nanoinfer.Recorder")


# vLLM's arguments that nanoinfer does not have, with the values that change nothing here. The first one is how nanoinfer acts.
# Any different value requests what is not supported.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "trust_remote_code": (False, True),  # a permission: there is no remote code to run
    "disable_log_stats": (True, False),
    "load_format": ("auto", "safetensors"),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "enable_chunked_prefill": (True, None),
    "enable_lora": (False, None),
    "speculative_config": (None,),
    "kv_cache_dtype": ("auto",),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),  # GiB that may be swapped out, 4 was vLLM's default
}
