"""vLLM's modules and names, so that the imports of a script for vLLM work when nanoinfer takes vllm's place in them.

In: the import of a module that only vLLM has, such as nanoinfer.inputs, or the use of a name that only vLLM has. Out: the
object of nanoinfer that does the same, or a placeholder that says in one sentence, when it is used, what to do instead.
docs/vllm.md lists all of them. Nothing here is imported before a script asks for such a name.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from nanoinfer.errors import UnsupportedError

# vLLM's modules that nanoinfer does not have -> the names that scripts import from them. "" is the package itself, and config
# one of nanoinfer's own modules.
MODULES = {
    "": "LLMEngine AsyncLLMEngine ModelRegistry PoolingParams PoolingRequestOutput EmbeddingRequestOutput "
    "ClassificationRequestOutput ScoringRequestOutput",
    "config": "VllmConfig CompilationConfig KVTransferConfig StructuredOutputsConfig AttentionConfig ProfilerConfig",
    "benchmarks.datasets": "add_dataset_parser get_samples",
    "distributed.device_communicators.pynccl": "PyNcclCommunicator",
    "distributed.parallel_state": "cleanup_dist_env_and_memory",
    "distributed.utils": "StatelessProcessGroup",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "entrypoints.llm": "LLM",
    "inputs": "PromptType TextPrompt TokensPrompt",
    "inputs.data": "PromptType TextPrompt TokensPrompt",
    "logger": "init_logger",
    "multimodal.utils": "fetch_image",
    "pooling_params": "PoolingParams",
    "utils": "FlexibleArgumentParser get_open_port random_uuid",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_open_port",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "v1.sample.logits_processor": "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality "
    "RequestLogitsProcessor",
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.worker.gpu_worker": "Worker",
}

# Those of the names that are objects of nanoinfer, beside the public ones -> the modules that define them.
HOMES = {
    "AsyncLLMEngine": "nanoinfer.async_llm",
    "LLMEngine": "nanoinfer.vllm_engine",
    "FlexibleArgumentParser": "nanoinfer.vllm_names",
    "init_logger": "nanoinfer.vllm_names",
    "cleanup_dist_env_and_memory": "nanoinfer.distributed",
    "VllmConfig": "nanoinfer.sampling.logits_processors",
    "process_dict_updates": "nanoinfer.sampling.logits_processors",
    **dict.fromkeys(MODULES["v1.sample.logits_processor"].split(), "nanoinfer.sampling.logits_processors"),
    **dict.fromkeys(MODULES["v1.metrics.reader"].split(), "nanoinfer.engine.metrics"),
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput"), "nanoinfer.embedding.pooling"),
    **dict.fromkeys(("EmbeddingRequestOutput", "ScoringRequestOutput"), "nanoinfer.embedding.pooling"),
}

_POOLING = "use LLM.embed() for embeddings and LLM.score() for scores; nanoinfer computes no classes or rewards"
_WEIGHTS = "use LLM.update_weights(pairs), or LLM.update_weights_from_path(folder)"
_BETWEEN_STEPS = "; with AsyncLLM: await async_llm.between_steps(lambda: async_llm.llm.METHOD())"
_PAUSE = "use LLM.pause() and LLM.resume(); with AsyncLLM: its pause(), and between_steps(async_llm.llm.resume)"
_INSIDE = "nanoinfer has no workers to call; llm.engine.executor is the executor, and its model_runner.model the model"
_PROFILE = "nanoinfer has no profiler of its own; use torch.profiler around generate(), or LLM(tracer=Recorder()) for its steps"

# The other names, which do nothing but say what to do instead.
PLACEHOLDERS = {
    "ClassificationRequestOutput": _POOLING,
    **dict.fromkeys(("PyNcclCommunicator", "StatelessProcessGroup"), _WEIGHTS),
    "AttentionConfig": "use LLM(attention_backend=...)",
    "CompilationConfig": "nanoinfer compiles by itself; leave it out, or use LLM(enforce_eager=True) to run the model's file",
    "KVTransferConfig": "the KV cache stays in one process; prefix_cache_dir keeps prefixes in files",
    "ModelRegistry": "use nanoinfer.register_model(name, Model), as notebook 12a does",
    "ProfilerConfig": _PROFILE,
    "StructuredOutputsConfig": "llguidance is the one backend; leave it out",
    "Worker": _INSIDE,
    "add_dataset_parser": "nanoinfer has no datasets; use prompts of your own, or the command nanoinfer bench",
    "fetch_image": "no model of nanoinfer reads images; use text prompts",
    "get_open_port": "nanoinfer has no data parallel ranks to connect; use nanoinfer batch --replicas N, or a port of your own",
    "get_samples": "nanoinfer has no datasets; use prompts of your own, or the command nanoinfer bench",
    "random_uuid": "use str(uuid.uuid4())",
}

# Methods and attributes of vLLM's LLM and AsyncLLM. Some are missing in our AsyncLLM alone.
METHODS = {
    **dict.fromkeys(("encode", "classify", "reward"), _POOLING),
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), f"use LLM.sleep() and LLM.wake_up(){_BETWEEN_STEPS}"),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine", "model_config", "vllm_config"), _INSIDE),
    **dict.fromkeys(("init_weight_transfer_engine", "update_weights", "reload_weights"), _WEIGHTS + _BETWEEN_STEPS),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("pause_generation", "resume_generation", "resume"), _PAUSE),
    "reset_prefix_cache": f"use LLM.reset_prefix_cache(){_BETWEEN_STEPS}",
    "get_tokenizer": "use async_llm.llm.get_tokenizer()",
    "preprocess_chat": "use llm.render_chat(messages)",
}

_RANKS = "use tensor_parallel_size=N to split the model, or nanoinfer batch --replicas N for several copies"
_WORKERS = "nanoinfer has no workers of vLLM's kind; LLM(stages=...) and register_model() take your own code"
_IDS = "prompts are text or token ids; use {'prompt_token_ids': ids}"

# Arguments of NEUTRAL_VALUES with any other value. Without a sentence here, the way out is to leave the argument out.
WAYS_OUT = {
    "runner": _POOLING,
    "task": _POOLING,
    "convert": _POOLING,
    "lora_request": "beams and embeddings use the model as it was loaded; use LLM(model, lora=path)",
    "pipeline_parallel_size": _RANKS,
    "data_parallel_size": _RANKS,
    "distributed_executor_backend": "use tensor_parallel_size=N, under torchrun or not; docs/scaling.md says how to use Ray",
    "enable_expert_parallel": "use tensor_parallel_size=N, which splits every expert",
    "worker_cls": _WORKERS,
    "worker_extension_cls": _WORKERS,
    "load_format": "the format of a checkpoint is read from its files; for random weights, use nanoinfer bench --random-model",
    "config_format": "a checkpoint needs Hugging Face's config.json",
    "tokenizer_mode": "a checkpoint needs Hugging Face's tokenizer.json",
    "hf_overrides": "copy the checkpoint, and change its config.json; Qwen3-Reranker needs none",
    "use_activation": "the checkpoint's modules.json says whether embeddings are normalised",
    "pooler_config": "the checkpoint's modules.json and 1_Pooling/config.json say how hidden rows are pooled",
    "override_generation_config": "use SamplingParams for each call",
    "enable_prompt_embeds": _IDS,
    "prompt_embeds": _IDS,
    "kv_transfer_config": PLACEHOLDERS["KVTransferConfig"],
    "profiler_config": _PROFILE,
    "compilation_config": "use enforce_eager=True to run the model's file, or leave it out",
    "num_gpu_blocks_override": "use kv_cache_memory=bytes",
    "structured_outputs_config": PLACEHOLDERS["StructuredOutputsConfig"],
    "backend": "llguidance is the one backend of structured outputs; leave it out",
    "multi_modal_data": "no model of nanoinfer reads images, sound or video; use text",
    "truncate_prompt_tokens": "pass the last tokens yourself, prompt_token_ids[-n:]",
}


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """A method or an attribute of vLLM's that nanoinfer does not have. hasattr() is False."""


def no_attribute(owner: object, name: str) -> NoReturn:
    """Refuse an attribute that an object does not have, with the way out if it is one of vLLM's."""
    missing = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in METHODS:
        raise UnsupportedAttributeError(f"{missing}: {METHODS[name]}")
    raise AttributeError(missing, name=name, obj=owner)


@cache
def named(module: str, name: str) -> object:
    """Return what a script for vLLM gets for a name of a module. Raises: AttributeError."""
    import nanoinfer

    if name not in MODULES.get(module.removeprefix("nanoinfer").removeprefix("."), "").split():
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if name in PLACEHOLDERS:
        refusal = f"{name} is vLLM's: {PLACEHOLDERS[name]}"
        return _Placeholder(name, (), {"__doc__": refusal, "__module__": module, "_refusal": refusal})
    return getattr(import_module(HOMES[name]) if name in HOMES else nanoinfer, name)


class _Placeholder(type):
    """The type of a name that can be imported and used in annotations. Any other use raises UnsupportedError."""

    _refusal: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(cls._refusal)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        cls()


# ---- modules


def find_spec(name: str) -> ModuleSpec | None:
    """Find one of MODULES, or a package that holds one."""
    if any(f"nanoinfer.{module}.".startswith(f"{name}.") for module in MODULES if module):
        return ModuleSpec(name, _VLLMLoader(), is_package=True)
    return None


class _VLLMModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        return named(self.__name__, name)


class _VLLMLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _VLLMModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass  # the names are looked up one by one


# ---- what scripts call


init_logger = logging.getLogger


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads --max_num_seqs as --max-num-seqs, as vLLM's does."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: object = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        dashed = [re.sub(r"^--[^=]+", lambda option: option[0].replace("_", "-"), one) for one in given]
        return super().parse_known_args(dashed, namespace)


def add_cli_arguments(parser: argparse.ArgumentParser, arguments: type, further: Mapping[str, tuple[object, ...]]) -> None:
    """Add an option for each field of a dataclass of arguments that a command line can give, and for vLLM's further arguments.

    further: vLLM's further arguments, with their neutral values. They are in the parsed arguments only if they were given.
    """
    for field in fields(arguments):
        kind = re.search(r"bool|int|float|str|Mapping", str(field.type))
        if kind is not None:
            default = None if field.default is MISSING else field.default
            _add_option(parser, field.name, kind[0], default)
    for name, (neutral, *_) in further.items():
        _add_option(parser, name, "bool" if isinstance(neutral, bool) else "JSON", argparse.SUPPRESS)


def _add_option(parser: argparse.ArgumentParser, name: str, kind: str, default: object) -> None:
    option = "--" + name.replace("_", "-")
    if kind == "bool":
        parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
    else:
        converters: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str, "Mapping": json.loads}
        parser.add_argument(option, type=converters.get(kind, _json_or_text), default=default)


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
