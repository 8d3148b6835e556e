"""What to do instead of vLLM's arguments, and vLLM's way to make options of them."""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields

_POOLING = "use LLM.embed() for embeddings and LLM.score() for scores; nanoinfer computes no classes or rewards"
_PROFILE = "nanoinfer has no profiler of its own; use torch.profiler around generate(), or LLM(tracer=Recorder()) for its steps"
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
    "kv_transfer_config": "the KV cache stays in one process; prefix_cache_dir keeps prefixes in files",
    "profiler_config": _PROFILE,
    "compilation_config": "use enforce_eager=True to run the model's file, or leave it out",
    "num_gpu_blocks_override": "use kv_cache_memory=bytes",
    "structured_outputs_config": "llguidance is the one backend; leave it out",
    "backend": "llguidance is the one backend of structured outputs; leave it out",
    "multi_modal_data": "no model of nanoinfer reads images, sound or video; use text",
    "truncate_prompt_tokens": "pass the last tokens yourself, prompt_token_ids[-n:]",
}


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
