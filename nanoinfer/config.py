"""The engine's settings: EngineArgs as users give them, and the checked EngineConfig, split by owner, that is made of them.

In: the arguments of LLM and AsyncLLM. Out: frozen values that are valid by themselves. Derived values are returned, never
written back. What depends on the model or on the machine (max_model_len, the number of blocks) is computed in execution/.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

from annotated_types import Ge, Interval
from typing_extensions import Doc

import nanoinfer
from nanoinfer.arguments import Allowed, Bytes, declarations, declared, read_fields
from nanoinfer.errors import InvalidTypeError, InvalidValueError, check_number, shown

if TYPE_CHECKING:
    import torch

    from nanoinfer.sampling.stages import Stage
    from nanoinfer.scheduling.block_manager import BlockManager
    from nanoinfer.scheduling.scheduler import Scheduler

BITS = {"int8": 8, "int4": 4}  # quantization -> bits of a linear layer's weight
DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}  # vLLM's spellings, and short spellings -> torch's


class Tracer(Protocol):
    """Receives the events of an engine, one at a time (features/tracing/events.py)."""

    def emit(self, event: Any) -> None: ...  # type: ignore[explicit-any]


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Settings of the paged KV cache. EngineArgs explains them."""

    block_size: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    block_manager_cls: "type[BlockManager] | None" = None
    prefix_cache_dir: str | None = None
    prefix_cache_size: int = 4 * 2**30

    def __post_init__(self) -> None:
        if (folder := self.prefix_cache_dir) is not None and not (isinstance(folder, str) and self.enable_prefix_caching):
            raise InvalidValueError(f"prefix_cache_dir must be a folder, with enable_prefix_caching, got {shown(folder)}")
        read_fields(self, EngineArgs)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much runs in one step. EngineArgs explains the settings."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    enable_chunked_prefill: bool = True
    chunk_size: int = 1024
    batch_invariant: bool = False
    scheduling_policy: str = "fcfs"
    scheduler_cls: "type[Scheduler] | None" = None

    def __post_init__(self) -> None:
        read_fields(self, EngineArgs)
        if self.scheduler_cls is not None and self.scheduling_policy != "fcfs":
            raise InvalidValueError(
                f"scheduling_policy={self.scheduling_policy!r} and scheduler_cls={shown(self.scheduler_cls)} were given; "
                "leave one out"
            )

    @property
    def chunk_grid(self) -> int:
        """The number of tokens at whose multiples prompts are cut. A chunk always fits an otherwise empty step."""
        return min(self.chunk_size, self.max_num_batched_tokens) if self.enable_chunked_prefill else self.max_num_batched_tokens


def named(name: str, given: object, kind: str = "a class or its name, such as 'my_module.MyClass'") -> object:
    """Return what a text, "module.Name" or "module:Name", names. Anything else is returned as it is. kind: what is allowed."""
    if not isinstance(given, str):
        return given
    module, _, attribute = given.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: there is no dot
        raise InvalidValueError(
            f"{name} must be {kind}, got {shown(given)} ({str(error)[:100]}); "
            "the module must be importable: install it, or put its folder into PYTHONPATH"
        ) from error


def class_named(name: str, given: object) -> type | None:
    """Check an argument that is a class, its name, or None. Returns the class."""
    given = named(name, given)
    if given is not None and not isinstance(given, type):
        raise InvalidTypeError(f"{name} must be a class or its name, such as 'my_module.MyClass', got {shown(given)}")
    return given


# Options of a request -> what is wrong if nothing reads them.
READ_IF = {
    "lora_request": "needs a model loaded with enable_lora=True",
    "priority": "has no effect with this scheduler; leave it out, or load the model with scheduling_policy='priority'",
}


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


def dtype_of_rounded(config: "EngineConfig") -> InvalidValueError:
    """Return the error of a dtype in which rounded weights do not compute."""
    return InvalidValueError(
        f"quantization={config.quantization!r} computes in bfloat16, got dtype={shown(config.dtype)}; leave dtype out"
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What engine/load.load_engine needs: the model, the device, and the settings of the parts. EngineArgs explains them."""

    model: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    dtype: str = "auto"  # a key of DTYPES
    quantization: str | None = None
    calibration: str | None = None
    screened_head: bool = True
    lora: tuple[tuple[str, float], ...] = ()  # adapters, each with its strength
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    cudagraph_capture: str = "load"
    async_scheduling: bool | None = None
    seed: int | None = None
    tracer: "Tracer | None" = None
    stages: "tuple[Stage, ...] | None" = None
    logits_processors: "tuple[type, ...]" = ()
    logprobs_mode: str = "raw"
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: "nanoinfer.SpeculativeConfig | None" = None

    def __post_init__(self) -> None:
        read_fields(self, EngineArgs)
        if not self.enable_lora and (self.max_loras, self.max_lora_rank) != (1, 16):
            raise InvalidValueError("max_loras and max_lora_rank need enable_lora=True; pass it, or leave them out")
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise InvalidValueError(f"tokenizer={self.tokenizer!r} and skip_tokenizer_init=True were given; leave one out")
        if self.dtype not in DTYPES:
            raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        if self.quantization is not None and DTYPES[self.dtype] == "float32":
            raise dtype_of_rounded(self)
        if self.stages is not None and not (isinstance(self.stages, tuple) and all(callable(stage) for stage in self.stages)):
            raise InvalidTypeError(
                f"stages must be a list of functions (logits, SamplingBatch) -> logits, got {shown(self.stages)}"
            )
        if isinstance(self.tracer, type) or (self.tracer is not None and not callable(getattr(self.tracer, "emit", None))):
            raise InvalidTypeError(f"tracer must have a method emit(event), got {shown(self.tracer)}; see nanoinfer.Recorder")
        if self.speculative is not None:
            self.speculative.check(self)
        rounds = self.quantization == "int4" or self.bits_of_copy == BITS["int4"]
        if self.calibration is not None and (not rounds or self.enforce_eager or self.skip_tokenizer_init):
            raise InvalidValueError(
                f"calibration={shown(self.calibration)} needs weights that are rounded to 4 bits, kernels and a tokenizer; "
                "leave it out, or pass quantization='int4' without enforce_eager and skip_tokenizer_init"
            )

    @property
    def bits_of_copy(self) -> int | None:
        """The bits of the weights of a rounded copy of the model, which Runtime.rounded_copy is. None: there is none."""
        return None if self.speculative is None else self.speculative.bits_of_copy

    @property
    def max_num_rows(self) -> int:
        """The most rows of a step whose logits are computed: one for each sequence, and those of speculative_config."""
        num_rows = self.scheduler.max_num_seqs
        return num_rows if self.speculative is None else self.speculative.max_num_rows(num_rows)


@declared
@dataclass(frozen=True)
class EngineArgs:
    """The arguments of LLM.

    Args: as declared below.

    vLLM's further arguments are accepted with the values that change nothing here, such as pipeline_parallel_size=1.
    """

    # fmt: off
    model: Annotated[str | os.PathLike[str] | None, Allowed("a string or a path"), Doc(
        'A folder with config.json and safetensors, a .gguf file, a hub name, or a bundled model ("tiny-qwen3", "tiny-gpt2", '
        '"tiny-tools"). None is tiny-qwen3. docs/supported.md lists the families.')] = None
    _: KW_ONLY
    tokenizer: Annotated[str | os.PathLike[str] | None, Allowed("a string or a path"),
        Doc("Folder or hub name of a different tokenizer. A model without one takes token ids and detokenize=False.")] = None
    skip_tokenizer_init: Annotated[bool, Doc(
        "Load no tokenizer. Prompts are token ids then, and requests need detokenize=False."
    )] = EngineConfig.skip_tokenizer_init
    revision: Annotated[str | None, Doc("Branch, tag or commit of a hub model.")] = None
    dtype: Annotated["str | torch.dtype", Doc(
        '"auto" (that of the checkpoint, but on a device that is slow at it float32 on a CPU, float16 on a GPU), '
        '"float32"/"float", "bfloat16", "float16"/"half", or a dtype of torch.')] = "auto"
    quantization: Annotated[str | None, Allowed("None, 'int8' or 'int4'"), Doc(
        '"int8" or "int4" keeps the linear layers in 8 or 4 bits. The rest is in bfloat16, on a GPU without it in float16.'
    )] = None
    calibration: Annotated[str | os.PathLike[str] | None, Allowed("a string or a path"), Doc(
        'A text by which "int4" rounds weights: inputs count by how large they are in its first 2,048 tokens. None: in random '
        "ones (docs/supported.md).")] = None
    screened_head: Annotated[bool, Doc(
        "On a CPU, keep a copy of a large LM head in 8 bits. Steps of few rows compute only the logits that may be the largest "
        "by it. The tokens stay the same (docs/usage.md).")] = EngineConfig.screened_head
    lora: Annotated[str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float] | None, Doc(
        "LoRA adapters in peft's format, merged into the weights for all requests: a folder or hub name, a list, or a "
        'dict of strengths, such as {"adapter": 0.5}. docs/checkpoints.md says what is supported.')] = None
    enable_lora: Annotated[bool,
        Doc("Let each request have an adapter of its own, generate(lora_request=...).")] = EngineConfig.enable_lora
    max_loras: Annotated[int, Ge(1), Doc(
        "The most of these adapters in a step. Their matrices are beside the weights, where kernels read them."
    )] = EngineConfig.max_loras
    max_lora_rank: Annotated[int, Ge(1), Doc("The highest rank of these adapters.")] = EngineConfig.max_lora_rank
    device: Annotated[str, Doc('"auto" (a GPU if there is one), "cpu", "cuda", or one of the GPUs, "cuda:0".')] = "auto"
    tensor_parallel_size: Annotated[int, Ge(1),
        Doc("Number of processes, or GPUs, among which the model is split (docs/scaling.md).")] = 1
    block_size: Annotated[int | None, Ge(1), Doc("Tokens per cache block. None is the attention backend's own.")] = None
    max_num_seqs: Annotated[int | None, Ge(1),
        Doc("Maximum number of running sequences. None is the default.")] = SchedulerConfig.max_num_seqs
    max_num_batched_tokens: Annotated[int | None, Ge(1), Doc(
        "Maximum number of prompt tokens per step. Unlike in vLLM, decoding sequences are not counted: each adds its token. A "
        "chunk that does not fit whole waits (docs/vllm.md). None is the default.")] = SchedulerConfig.max_num_batched_tokens
    scheduling_policy: Annotated[str, Allowed("'fcfs', 'priority' or 'deadline'; scheduler_cls takes a class of your own"), Doc(
        'Which request starts first, and is preempted last: "fcfs" (first come, first served), "priority" (the lowest '
        '`priority` of generate()), or "deadline" (the earliest arrival + `timeout` of SamplingParams).'
    )] = SchedulerConfig.scheduling_policy
    scheduler_cls: Annotated["str | type[Scheduler] | None", Doc(
        'A subclass of nanoinfer.scheduling.scheduler.Scheduler, or its name "module.Class", for a policy of your own. The '
        "tokens stay the same (docs/usage.md).")] = None
    block_manager_cls: Annotated["str | type[BlockManager] | None", Doc(
        "A subclass of nanoinfer.scheduling.block_manager.BlockManager, or its name, for example one that evicts other blocks "
        "from the prefix cache.")] = None
    enable_chunked_prefill: Annotated[bool | None, Doc(
        "False computes each prompt in one step, which requires max_num_batched_tokens >= max_model_len. None is the default."
    )] = SchedulerConfig.enable_chunked_prefill
    chunk_size: Annotated[int, Ge(1), Doc(
        "Longer prompts are computed in chunks, cut at absolute multiples of this, or of max_num_batched_tokens if that is "
        "smaller.")] = SchedulerConfig.chunk_size
    max_model_len: Annotated[int | None, Ge(1),
        Doc("Maximum number of tokens of prompt and answer. None is the model's own. Lowered to what the cache holds.")] = None
    kv_cache_memory: Annotated[int | None, Ge(1), Bytes(), Doc(
        "Bytes for each rank's KV cache. None is, on a GPU, what gpu_memory_utilization leaves beside the weights, and on a "
        "CPU half of the free memory, at most 4 GiB. Never more than max_num_seqs sequences can use.")] = None
    kv_cache_dtype: Annotated[str, Allowed("'auto' or 'int8'"), Doc(
        '"auto" is the dtype of the model, and "int8" keeps keys and values in 8 bits. A scale per token and head is '
        "kept with them: twice as many tokens in the same memory as with bfloat16, and half of it to read for each new token."
    )] = CacheConfig.kv_cache_dtype
    gpu_memory_utilization: Annotated[float, Interval(gt=0, le=1),
        Doc("Share of the GPU's memory for weights and cache. No effect on a CPU.")] = CacheConfig.gpu_memory_utilization
    enable_prefix_caching: Annotated[bool | None,
        Doc("Compute common prefixes of prompts once. None is the default.")] = CacheConfig.enable_prefix_caching
    prefix_cache_dir: Annotated[str | os.PathLike[str] | None,
        Doc("A folder that keeps the cached prefixes for the next process (docs/usage.md).")] = None
    prefix_cache_size: Annotated[int, Ge(1), Bytes(),
        Doc("The most bytes that the files in prefix_cache_dir may take.")] = CacheConfig.prefix_cache_size
    batch_invariant: Annotated[bool, Doc(
        "Require that a token's logits have the same bits wherever its sequence's tokens are computed: in any batch, as prompt "
        "or as answer, after a prefix hit and after a preemption. So `logprobs` of an answer equal `prompt_logprobs` of the "
        "same text. The attention then computes one query at a time. On a CPU a prompt of 1,024 tokens takes 1.1 to 1.3 times "
        "as long. On a GPU the products are Triton's, with a fixed order of additions, and prompts take longest. "
        "Checked when the model is loaded, and refused where it cannot be kept. Without batch_invariant, "
        "`LLM.batch_independent` says whether the bits are the same in any batch, prefix hits and preemptions aside."
    )] = SchedulerConfig.batch_invariant
    attention_backend: Annotated[str, Doc(
        '"auto" (the best one that is installed and supports the model, which the log explains), "cpu", "flash", "triton" or '
        '"reference".')] = "auto"
    enforce_eager: Annotated[bool, Doc(
        "Run the model as its file says, and nothing of nanoinfer/fast: no kernels, no CUDA graphs. A breakpoint in the "
        "model's file stops. `batch_independent` is then False.")] = False
    cudagraph_capture: Annotated[str, Allowed("'load', 'idle' or 'first_use'"), Doc(
        'When a GPU captures the CUDA graphs of steps and draws: "load" (before the first request), "idle" (those that '
        'occurred, when no request runs), or "first_use" (when a step needs them, for which every request waits).'
    )] = EngineConfig.cudagraph_capture
    async_scheduling: Annotated[bool | None,
        Doc("Prepare a step while the previous step runs. The tokens are the same. None is True on a GPU only.")] = None
    speculative_config: Annotated[Mapping[str, object] | None, Doc(
        'Speculative decoding: guess tokens, and check several in one step. {"method": "ngram"} repeats earlier text. '
        '{"method": "draft_model", "model": name} asks a smaller model with the same vocabulary, {"method": "mtp"} '
        """a layer of Qwen3.5's own checkpoint, {"method": "quantized"} the model itself in 4 bits, and """
        '{"method": "my_module:MyProposer"} your own class. More keys: nanoinfer.SpeculativeConfig. The tokens are '
        "those of plain decoding (see `LLM.batch_independent`).")] = None
    seed: Annotated[int | None, Interval(ge=0, le=2**64 - 1), Allowed("in 0 .. 2**64 - 1"), Doc(
        "For requests without their own seed. The same seed and the same calls give the same answers. None draws a seed from "
        "the operating system and logs it at level INFO.")] = None
    stages: Annotated["str | list[Stage] | tuple[Stage, ...] | None", Doc(
        "The sampler's stages in their order, or the name of such a list in a module, my_module.STAGES. "
        "`[*STAGES, mine]`, from nanoinfer.sampling.sampler, adds your own.")] = None
    logits_processors: Annotated[Sequence[str | type] | None, Doc(
        'Classes of the V1 interface of vLLM, or their names "module:Class": subclasses of LogitsProcessor from '
        "nanoinfer.v1.sample.logits_processor, which change the logits of all rows of a step.")] = None
    logprobs_mode: Annotated[str,
        Allowed("'raw', 'raw_logprobs', 'raw_logits', 'processed', 'processed_logprobs' or 'processed_logits'"), Doc(
        '"raw" (or "raw_logprobs") returns the log-probabilities of the model, "processed" (or "processed_logprobs") those '
        'after all stages. "raw_logits" and "processed_logits" return logits instead.')] = "raw"
    tracer: Annotated["Tracer | None", Doc("Receives the engine's events, see nanoinfer.Recorder.")] = None
    # fmt: on

    def to_config(self) -> EngineConfig:
        """Check the arguments, and split them by owner.

        Raises:
            InvalidValueError, InvalidTypeError: An argument out of its range, or of the wrong type.
            UnsupportedError: A combination that is not supported.
        """
        given: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(EngineArgs)}
        for name in ("model", "tokenizer", "calibration", "prefix_cache_dir"):
            if isinstance(path := given[name], os.PathLike):
                given[name] = os.fspath(path)
        for name in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill"):
            if given[name] is None:
                del given[name]  # the default
        torch = sys.modules.get("torch")  # a torch.dtype exists only where torch is imported, which takes a second
        if torch is not None and isinstance(self.dtype, torch.dtype):
            given["dtype"] = str(self.dtype).removeprefix("torch.")
        stages = named("stages", self.stages, "a list of functions or its name, such as 'my_module.STAGES'")
        given["stages"] = tuple(stages) if isinstance(stages, list) else stages
        for name in ("scheduler_cls", "block_manager_cls"):
            given[name] = class_named(name, given[name])
        given["logits_processors"] = ()
        if self.logits_processors is not None:
            given["logits_processors"] = nanoinfer.processor_classes(self.logits_processors)
        given["lora"] = lora_adapters(self.lora)
        if (speculative := given.pop("speculative_config")) is not None:
            given["speculative"] = nanoinfer.SpeculativeConfig.of(speculative)  # checked by the feature, imported now
        for name, owner in (("cache", CacheConfig), ("scheduler", SchedulerConfig)):
            given[name] = owner(**{field.name: given.pop(field.name) for field in fields(owner) if field.name in given})  # type: ignore[arg-type]
        return EngineConfig(**given)  # type: ignore[arg-type]  # the configs check the types

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each argument to the parser of a script, and return the parser, as vLLM does."""
        return nanoinfer.add_cli_arguments(parser, cls)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take this class's arguments from those that a parser (add_cli_args) has read, and ignore the script's own."""
        return cls(**nanoinfer.given_arguments(args, cls))


@declared
@dataclass(frozen=True, kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """The arguments of AsyncLLM: those of LLM, and two of its own.

    Args: as declared below.
    """

    # fmt: off
    max_num_queued_requests: Annotated[int | None, Ge(0),
        Doc("How many requests may wait while max_num_seqs run. n answers count n times. None is no limit.")] = None
    streaming: Annotated[bool,
        Doc("False delivers answers when they end, and nothing before, which costs less for those who read no stream.")] = True
    # fmt: on

    def __post_init__(self) -> None:
        for name in ("max_num_queued_requests", "streaming"):  # to_config() reads the others
            declarations(AsyncEngineArgs)[name].read(getattr(self, name))


if not TYPE_CHECKING:
    __getattr__ = nanoinfer.__getattr__  # vLLM's further names
