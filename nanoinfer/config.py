"""The engine's settings, split by who owns them. Frozen and checked: what is derived from them is returned, never written back.

In: the arguments of LLM. Out: values that cannot be wrong by themselves; what depends on the model or on the machine
(max_model_len, the number of blocks) is settled in engine.py and kv_cache.py.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_flag,
    check_integer,
    check_number,
    unknown_argument,
)

if TYPE_CHECKING:
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
    """The paged KV cache.

    block_size: tokens a block holds; None takes the attention backend's own.
    kv_cache_memory: bytes for the cache on any device; None sizes it (kv_cache.py says how).
    gpu_memory_utilization: share of a GPU's memory that weights and cache may take together; used on CUDA only.
    enable_prefix_caching: keep finished blocks, and reuse them for prompts that begin with the same tokens.
    """

    block_size: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 1, None, ">= 1", or_none=True)
        check_integer("kv_cache_memory", self.kv_cache_memory, 1, None, ">= 1", or_none=True)
        # The range is open at 0: the smallest number above it.
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, math.ulp(0.0), 1.0, "in (0, 1]")
        check_flag("enable_prefix_caching", self.enable_prefix_caching)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much runs in one step.

    max_num_seqs: sequences that may run at once.
    max_num_batched_tokens: prompt tokens one step may compute; a running decode always gets its one token beside them.
    chunk_size: a prompt is cut at absolute multiples of this (and of max_num_batched_tokens, if that is smaller).
    batch_invariant: let neither the prefix cache nor a preemption change how a sequence is computed (scheduler.py says how).
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
        """Prompts are cut at multiples of this. A chunk always fits an otherwise empty step."""
        return min(self.chunk_size, self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything LLMEngine.load needs: what to load, onto what, and the settings of the parts."""

    model: str | None = None  # a folder, a hub name, the name of a bundled model; None: the bundled default
    tokenizer: str | None = None  # a folder or hub name; None: the model's own
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None  # or "int8": linear layers in 8 bits
    device: str = "auto"
    max_model_len: int | None = None  # tokens of prompt + output; None: the model's own
    attention_backend: str = "auto"
    enforce_eager: bool = False
    async_scheduling: bool | None = None  # launch a step before the one before it is read; None: on a GPU
    seed: int = 0
    tracer: "Tracer | None" = None
    stages: tuple[Any, ...] | None = None  # the sampler's; None: sampling.sampler.STAGES
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


# vLLM's arguments that nanoinfer has no use for, with the values that change nothing here: the first is how it acts. Any other
# value asks for what it does not do.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
    "swap_space": (0, 4),  # the most it may swap; 4 was vLLM's default
}


def refuse_unknown(unknown: dict[str, Any], known: list[str]) -> None:
    """Arguments of LLM() that are not among the known ones. Raises: UnsupportedError, InvalidTypeError."""
    for name, value in unknown.items():
        if name not in NEUTRAL_VALUES:
            raise unknown_argument("LLM()", name, known)
        if value not in NEUTRAL_VALUES[name]:
            raise UnsupportedError(f"{name}={value!r} is not supported; leave it out (it acts as {NEUTRAL_VALUES[name][0]!r})")
