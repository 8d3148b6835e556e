"""The engine's settings, split by owner. Frozen and checked: derived values are returned, never written back.

In: the arguments of LLM. Out: values that are valid by themselves. What depends on the model or on the machine (max_model_len,
the number of blocks) is computed in execution/uniproc_executor.py and execution/memory.py.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar

from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_argument_names,
    check_flag,
    check_integer,
    check_number,
    is_one_of,
    shown,
)

if TYPE_CHECKING:
    from nanoinfer.sampling.sampler import Stage
    from nanoinfer.tracing import Tracer

T = TypeVar("T")

MAX_ROWS_WITH_DRAFTS = 256  # of a step, unless max_num_seqs is larger

DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}  # vLLM's spellings -> torch's
LOGPROBS_MODES = {"raw": "raw", "raw_logprobs": "raw", "processed": "processed", "processed_logprobs": "processed"}


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
class SpeculativeConfig:
    """Speculative decoding: which tokens are guessed, and how many. The tokens that are returned stay the same.

    Args:
        method: "ngram" repeats what followed the newest tokens when they occurred before. "draft_model" asks a smaller model.
        num_speculative_tokens: The most tokens that are guessed per sequence and step, 1 .. 64.
        adaptive: Guess only as many as pay, by the time that steps take and by the share of guesses that were right.
        prompt_lookup_min: The fewest newest tokens that must have occurred before ("ngram").
        prompt_lookup_max: The most newest tokens that are looked up ("ngram").
        model: A folder, a hub name or a bundled model with the same vocabulary ("draft_model").
    """

    method: str
    num_speculative_tokens: int = 8
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    model: str | None = None

    def __post_init__(self) -> None:
        if not is_one_of(self.method, ("ngram", "draft_model")):
            raise InvalidValueError(f"speculative_config's method must be 'ngram' or 'draft_model', got {shown(self.method)}")
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, 64, "in 1 .. 64")
        check_flag("adaptive", self.adaptive)
        check_integer("prompt_lookup_min", self.prompt_lookup_min, 1, None, ">= 1")
        low = self.prompt_lookup_min
        check_integer("prompt_lookup_max", self.prompt_lookup_max, low, None, f">= prompt_lookup_min ({low})")
        if (self.method == "draft_model") != isinstance(self.model, str):
            way_out = "leave it out" if self.method == "ngram" else "pass a folder, a hub name or a bundled model"
            raise InvalidValueError(
                f"speculative_config's model, with method {self.method!r}, is {shown(self.model)}; {way_out}"
            )

    @classmethod
    def of(cls, given: object) -> "SpeculativeConfig | None":
        """Check LLM's speculative_config, a dict or None."""
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise InvalidTypeError(f"speculative_config must be a dict such as {{'method': 'ngram'}}, got {shown(given)}")
        if "method" not in given:
            raise InvalidValueError(f"speculative_config needs a method, 'ngram' or 'draft_model', got {shown(given)}")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise InvalidTypeError(f"speculative_config has no {shown(unknown[0])}; known are {', '.join(known)}")
        return cls(**given)


def lora_adapters(given: object) -> tuple[tuple[str, float], ...]:
    """Check LLM's lora: a folder, a list of folders, a dict of folder -> strength, or None. Returns folders and strengths."""
    if given is None:
        return ()
    if isinstance(given, str | os.PathLike):
        given = [given]
    if not isinstance(given, Mapping | list | tuple):
        raise InvalidTypeError(f"lora must be a folder, a list of folders or a dict of folder -> strength, got {shown(given)}")
    adapters = []
    for path, strength in given.items() if isinstance(given, Mapping) else [(path, 1.0) for path in given]:
        if not isinstance(path, str | os.PathLike):
            raise InvalidTypeError(f"lora must name folders, got {shown(path)}")
        check_number("a strength in lora", strength, -1e6, 1e6, "in -1e6 .. 1e6")
        adapters.append((os.fspath(path), float(strength)))
    return tuple(adapters)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What engine/factory.load_engine needs: the model, the device, and the settings of the parts."""

    model: str | None = None  # a folder, a hub name, the name of a bundled model. None: the bundled default
    tokenizer: str | None = None  # a folder or hub name. None: the model's own
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None  # or "int8" or "int4": linear layers in 8 or 4 bits
    lora: tuple[tuple[str, float], ...] = ()  # adapters to merge into the weights, each with its strength
    device: str = "auto"
    tensor_parallel_size: int = 1  # ranks among which the model is split
    max_model_len: int | None = None  # tokens of prompt + output. None: the model's own
    attention_backend: str = "auto"
    enforce_eager: bool = False
    async_scheduling: bool | None = None  # launch a step before the previous one is read. None: on a GPU
    seed: int | None = None  # None: the engine draws one
    tracer: "Tracer | None" = None
    stages: "tuple[Stage, ...] | None" = None  # the sampler's. None: sampling.sampler.STAGES
    logprobs_mode: str = "raw"  # a key of LOGPROBS_MODES
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidTypeError(f"{name} must be a string, got {shown(value)}")
        for name in ("dtype", "device", "attention_backend"):
            if not isinstance(getattr(self, name), str):
                raise InvalidTypeError(f"{name} must be a string, got {shown(getattr(self, name))}")
        if self.dtype not in DTYPES:
            raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        if not is_one_of(self.quantization, (None, "int8", "int4")):
            raise InvalidValueError(f"quantization must be None, 'int8' or 'int4', got {shown(self.quantization)}")
        if self.quantization is not None and DTYPES[self.dtype] not in ("auto", "bfloat16"):
            raise InvalidValueError(
                f"quantization={self.quantization!r} computes in bfloat16, got dtype={shown(self.dtype)}; leave dtype out"
            )
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1, None, ">= 1")
        check_integer("max_model_len", self.max_model_len, 1, None, ">= 1", or_none=True)
        check_flag("enforce_eager", self.enforce_eager)
        if self.async_scheduling is not None:
            check_flag("async_scheduling", self.async_scheduling)
        check_integer("seed", self.seed, 0, 2**64 - 1, "in 0 .. 2**64 - 1", or_none=True)
        if not is_one_of(self.logprobs_mode, tuple(LOGPROBS_MODES)):
            raise InvalidValueError(f"logprobs_mode must be 'raw' or 'processed', got {shown(self.logprobs_mode)}")
        if self.stages is not None and not (isinstance(self.stages, tuple) and all(callable(stage) for stage in self.stages)):
            raise InvalidTypeError(
                f"stages must be a list of functions (logits, SamplingBatch) -> logits, got {shown(self.stages)}"
            )
        if isinstance(self.tracer, type) or (self.tracer is not None and not callable(getattr(self.tracer, "emit", None))):
            raise InvalidTypeError(f"tracer must have a method emit(event), got {shown(self.tracer)}; see nanoinfer.Recorder")
        if self.speculative is not None and self.async_scheduling:
            raise UnsupportedError("speculative_config needs every token before the next step; leave async_scheduling out")
        if self.speculative is not None and self.stages is not None:
            raise UnsupportedError("speculative_config with stages of your own is not supported; leave one of the two out")

    @property
    def max_num_rows(self) -> int:
        """The most rows of a step whose logits are computed: one for each running sequence, and those of draft tokens."""
        num_rows = self.scheduler.max_num_seqs
        if self.speculative is None:
            return num_rows
        return max(num_rows, min(MAX_ROWS_WITH_DRAFTS, num_rows * (1 + self.speculative.num_speculative_tokens)))


# vLLM's arguments that nanoinfer does not have, with the values that change nothing here. The first one is how nanoinfer acts.
# Any different value requests what is not supported.
_GENERATE: dict[str, tuple[object, ...]] = {
    "lora_request": (None,),
    "priority": (None,),
    "prompt_adapter_request": (None,),
    "tokenization_kwargs": (None, {}),
}
NEUTRAL_VALUES: dict[str, dict[str, tuple[object, ...]]] = {
    "LLM()": {
        "runner": ("generate", "auto"),
        "task": ("generate", "auto", None),
        "convert": ("none", "auto"),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "distributed_executor_backend": (None, "uni"),
        "trust_remote_code": (False, True),  # a permission: there is no remote code to run
        "disable_log_stats": (True, False),
        "load_format": ("auto", "safetensors"),
        "config_format": ("auto", "hf"),
        "generation_config": ("auto",),
        "override_generation_config": (None, {}),
        "hf_overrides": (None, {}),
        "hf_token": (None,),
        "download_dir": (None,),
        "code_revision": (None,),
        "tokenizer_revision": (None,),
        "tokenizer_mode": ("auto",),
        "skip_tokenizer_init": (False,),
        "enable_chunked_prefill": (True, None),
        "disable_sliding_window": (False,),
        "disable_custom_all_reduce": (False, True),  # there is one device
        "enable_lora": (False, None),
        "limit_mm_per_prompt": (None, {}),
        "mm_processor_kwargs": (None,),
        "logits_processors": (None, []),
        "max_logprobs": (-1,),  # no limit
        "structured_outputs_config": (None,),
        "compilation_config": (None,),
        "kv_cache_dtype": ("auto",),
        "kv_cache_memory_bytes": (None,),
        "num_gpu_blocks_override": (None,),
        "cpu_offload_gb": (0,),
        "swap_space": (0, 4),  # GiB that may be swapped out, 4 was vLLM's default
        "scheduling_policy": ("fcfs",),
    },
    "generate()": _GENERATE,
    "chat()": {
        **_GENERATE,
        "chat_template_content_format": ("auto", "string"),
        "continue_final_message": (False,),
        "mm_processor_kwargs": (None,),
    },
    "beam_search()": {"lora_request": (None,), "use_tqdm": (False,), "concurrency_limit": (None,)},
    "SamplingParams": {
        "guided_decoding": (None,),
        "spaces_between_special_tokens": (True,),
        "output_kind": (None,),
        "extra_args": (None, {}),
        "flat_logprobs": (False,),
        "truncate_prompt_tokens": (None,),
        "skip_reading_prefix_cache": (None, False),
    },
    "StructuredOutputsParams": {
        "disable_additional_properties": (False,),
        "whitespace_pattern": (None,),
        "structural_tag": (None,),
    },
    "BeamSearchParams": {"temperature": (0.0,), "include_stop_str_in_output": (False,)},
    "a prompt": {
        "multi_modal_data": (None,),
        "multi_modal_uuids": (None,),
        "mm_processor_kwargs": (None,),
        "token_type_ids": (None,),
        "cache_salt": (None,),
    },
}


def named_arguments(cls: type[T]) -> type[T]:
    """Decorate a dataclass, so that an argument that does not exist is refused with the one that was probably meant."""
    cls.__init__ = check_argument_names(cls.__name__, NEUTRAL_VALUES[cls.__name__])(cls.__init__)  # type: ignore[method-assign]
    return cls
