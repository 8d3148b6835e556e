"""vLLM's modules and names, so that the imports of a script for vLLM work when nanoinfer takes vllm's place in them.

In: the import of a module that only vLLM has, such as nanoinfer.inputs, or the use of a name that only vLLM has. Out: the
object of nanoinfer that does the same, or a placeholder that says in one sentence, when it is used, what to do instead.
docs/vllm.md lists all of them. Nothing here is imported before a script asks for such a name.
"""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from nanoinfer.config import NEUTRAL
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
    **dict.fromkeys(("PoolingParams", "PoolingRequestOutput"), "nanoinfer.pooling"),
    **dict.fromkeys(("EmbeddingRequestOutput", "ScoringRequestOutput"), "nanoinfer.pooling"),
}

_POOLING = NEUTRAL["task"][1]
_WEIGHTS = "use LLM.update_weights(pairs), or LLM.update_weights_from_path(folder)"
_BETWEEN_STEPS = "; with AsyncLLM: await async_llm.between_steps(lambda: async_llm.llm.METHOD())"
_PAUSE = "use LLM.pause() and LLM.resume(); with AsyncLLM: its pause(), and between_steps(async_llm.llm.resume)"
_INSIDE = "nanoinfer has no workers to call; llm.engine.executor is the executor, and its model_runner.model the model"
_PROFILE = NEUTRAL["profiler_config"][1]

# The other names, which do nothing but say what to do instead.
PLACEHOLDERS = {
    "ClassificationRequestOutput": _POOLING,
    **dict.fromkeys(("PyNcclCommunicator", "StatelessProcessGroup"), _WEIGHTS),
    "AttentionConfig": "use LLM(attention_backend=...)",
    "CompilationConfig": "nanoinfer compiles by itself; leave it out, or use LLM(enforce_eager=True) to run the model's file",
    "KVTransferConfig": NEUTRAL["kv_transfer_config"][1],
    "ModelRegistry": "use nanoinfer.register_model(name, Model), as notebook 12a does",
    "ProfilerConfig": _PROFILE,
    "StructuredOutputsConfig": NEUTRAL["structured_outputs_config"][1],
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
