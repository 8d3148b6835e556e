"""The door for scripts that were written for vLLM: which arguments are accepted, and how wrong ones are refused by name.

In: the arguments of a call. Out: the same call without those of vLLM's arguments that change nothing here, or an error with the
argument that was probably meant.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from nanoinfer.errors import InvalidTypeError, UnsupportedError, is_one_of, shown, suggest

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

# vLLM's other names of arguments that nanoinfer has: names of its earlier versions, and one that says the unit.
OTHER_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "prompt_token_ids": "prompts",
    "guided_decoding": "structured_outputs",
}

# vLLM's arguments that nanoinfer does not have, with the values that change nothing here. The first one is how nanoinfer acts.
# Any different value requests what is not supported.
_GENERATE: dict[str, tuple[object, ...]] = {
    "prompt_adapter_request": (None,),
    "tokenization_kwargs": (None, {}),
}
_LLM: dict[str, tuple[object, ...]] = {
    "runner": ("generate", "auto", "pooling"),  # every LLM generates, embeds and scores
    "task": ("generate", "auto", None, "embed", "embedding", "score"),
    "convert": ("none", "auto", "embed"),
    "pooler_config": (None,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "data_parallel_backend": ("mp",),
    "distributed_executor_backend": (None, "uni", "mp", "external_launcher"),  # LLM finds out who starts the ranks
    "enable_expert_parallel": (False,),
    "worker_cls": ("auto",),
    "worker_extension_cls": (None, ""),
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
    "allowed_local_media_path": ("",),
    "tokenizer_revision": (None,),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "disable_sliding_window": (False,),
    "disable_custom_all_reduce": (False, True),  # there is one device
    "disable_chunked_mm_input": (False, True),  # there are no images
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False, True),  # sleep() needs no preparation
    "max_cpu_loras": (None, 1, 2),  # all that were named are kept
    "kv_transfer_config": (None,),
    "profiler_config": (None,),
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None,),
    "max_logprobs": (-1,),  # no limit
    "structured_outputs_config": (None,),
    "compilation_config": (None,),
    "num_gpu_blocks_override": (None,),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),  # GiB that may be swapped out, 4 was vLLM's default
}
NEUTRAL_VALUES: dict[str, dict[str, tuple[object, ...]]] = {
    "LLM()": _LLM,
    "AsyncLLM()": _LLM,
    "EngineArgs": _LLM,
    "AsyncEngineArgs": _LLM,
    "generate()": _GENERATE,
    "chat()": {
        **_GENERATE,
        "chat_template_content_format": ("auto", "string"),
        "mm_processor_kwargs": (None,),
    },
    "add_request()": {
        **_GENERATE,
        "arrival_time": (None,),
        "trace_headers": (None,),
    },
    "reset_prefix_cache()": {"reset_running_requests": (False, True)},  # a reset is possible while requests run
    **{owner: {**_GENERATE, "lora_request": (None,)} for owner in ("embed()", "score()")},
    "PoolingParams": {"task": (None, "embed", "score"), "use_activation": (None,)},
    "beam_search()": {"lora_request": (None,), "use_tqdm": (False,), "concurrency_limit": (None,)},
    "SamplingParams": {
        "spaces_between_special_tokens": (True,),
        "flat_logprobs": (False,),
        "truncate_prompt_tokens": (None,),
        "skip_reading_prefix_cache": (None, False),
    },
    "StructuredOutputsParams": {
        "backend": (None, "auto", "guidance"),
        "disable_fallback": (False, True),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (None,),
        "structural_tag": (None,),
    },
    "BeamSearchParams": {"temperature": (0.0,), "include_stop_str_in_output": (False,)},
    "a prompt": {
        "prompt_embeds": (None,),
        "multi_modal_data": (None,),
        "multi_modal_uuids": (None,),
        "mm_processor_kwargs": (None,),
        "token_type_ids": (None,),
    },
}


def arguments_of(arguments: Callable[P, T], owner: str) -> Callable[[Callable[[S, T], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method that takes a dataclass of arguments, so that it is called with the dataclass's own arguments.

    The signature becomes the one of the dataclass, for type checkers and for `inspect.signature`, and is checked as
    check_argument_names does.
    """

    def decorate(method: Callable[[S, T], R]) -> Callable[Concatenate[S, P], R]:
        def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, arguments(*args, **kwargs))

        parameters = inspect.signature(arguments).parameters.values()
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        functools.update_wrapper(called, method)
        called.__signature__ = inspect.Signature([own, *parameters], return_annotation=None)  # type: ignore[attr-defined]
        called.__doc__ = "\n\n".join(filter(None, map(inspect.getdoc, (method, arguments))))
        return check_argument_names(owner)(called)

    return decorate


def check_argument_names(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method, so that wrong arguments are refused by name before Python's own bare TypeError.

    The signature stays the one of the decorated method, for type checkers and for `inspect.signature`. `owner` is the name in
    the messages, such as "LLM()", whose NEUTRAL_VALUES are accepted and ignored. The method then raises InvalidTypeError for an
    argument that is unknown, missing or not given by name, and UnsupportedError for a neutral one with a different value. An
    argument under one of OTHER_NAMES is passed on under nanoinfer's.
    """
    neutral = NEUTRAL_VALUES.get(owner, {})

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]  # without self
        known = [parameter.name for parameter in parameters]
        positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if (surplus := args[1 + len(positional) :]) and len(known) > len(positional):
                after = f" after {positional[-1]}" if positional else ""
                way_out = f"write {known[len(positional)]}={shown(surplus[0])}"
                raise InvalidTypeError(f"{owner} takes keyword arguments only{after}, got {shown(surplus)}; {way_out}")
            for name in [name for name in kwargs if name not in known]:
                value = kwargs.pop(name)
                if (ours := OTHER_NAMES.get(name)) in known:
                    if value is None:
                        continue
                    if ours in kwargs or ours in positional[: len(args) - 1]:
                        raise InvalidTypeError(f"{owner} got {ours} twice: {name} is another name for it; leave one out")
                    kwargs[ours] = value
                    continue
                if name not in neutral:
                    raise InvalidTypeError(f"{owner} has no argument {name!r}; {suggest(name, known)}")
                check_neutral(name, value, neutral[name])
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # an argument is missing, or given twice
                raise InvalidTypeError(f"{owner}: {error}") from None
            return method(*args, **kwargs)

        return checked

    return decorate


def check_neutral(name: str, value: object, neutral: Sequence[object]) -> None:
    """Refuse a value of another library's argument, unless it is one of those that change nothing here."""
    if not is_one_of(value, neutral):
        from nanoinfer.vllm_names import WAYS_OUT

        way_out = WAYS_OUT.get(name, f"leave it out (it acts as {neutral[0]!r})")
        raise UnsupportedError(f"{name}={shown(value)} is not supported; {way_out}")


def named_arguments(cls: type[T]) -> type[T]:
    """Decorate a dataclass, so that an argument that does not exist is refused with the one that was probably meant."""
    cls.__init__ = check_argument_names(cls.__name__)(cls.__init__)  # type: ignore[method-assign]
    return cls
