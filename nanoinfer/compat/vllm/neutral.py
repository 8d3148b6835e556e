"""vLLM's arguments, methods and attributes that nanoinfer lacks, and what happens where a script uses them.

In: a name that the called function or the object does not know. Out: nanoinfer's name for it, or an error that says what to do
instead. Who meets an unknown name gets these functions from nanoinfer/__init__.py. docs/vllm.md lists all names.
"""

from collections.abc import Mapping

from nanoinfer.errors import UnsupportedAttributeError, UnsupportedError, is_one_of, shown

# Name -> nanoinfer's own name for the argument, or a pair: the values that change nothing here (the first is what nanoinfer
# does), and the advice for any other value ("": leave the argument out).
Neutral = Mapping[str, str | tuple[tuple[object, ...], str]]

_POOLING = "use LLM.embed() for embeddings and LLM.score() for scores; nanoinfer computes no classes or rewards"
_RANKS = "use tensor_parallel_size=N to split the model, or nanoinfer batch --replicas N for several copies"
_WORKERS = "nanoinfer has no workers of vLLM's kind; LLM(stages=...) and register_model() take your own code"
_PROFILE = "nanoinfer has no profiler of its own; use torch.profiler around generate(), or LLM(tracer=Recorder()) for its steps"
_INSIDE = "nanoinfer has no workers to call; llm.engine.executor is the executor, and its runner.model the model"
_PAUSE = "use LLM.pause() and LLM.resume(); with AsyncLLM: its pause(), and between_steps(async_llm.llm.resume)"

_OF_LLM: Neutral = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "runner": (("generate", "auto", "pooling"), _POOLING),  # every LLM generates, embeds and scores
    "task": (("generate", "auto", None, "embed", "embedding", "score"), _POOLING),
    "convert": (("none", "auto", "embed"), _POOLING),
    "pooler_config": ((None,), "the checkpoint's modules.json and 1_Pooling/config.json say how hidden rows are pooled"),
    "pipeline_parallel_size": ((1,), _RANKS),
    "data_parallel_size": ((1,), _RANKS),
    "data_parallel_backend": (("mp",), ""),
    "distributed_executor_backend": (
        (None, "uni", "mp", "external_launcher"),  # LLM finds out who starts the ranks
        "use tensor_parallel_size=N, under torchrun or not; docs/scaling.md says how to use Ray",
    ),
    "enable_expert_parallel": ((False,), "use tensor_parallel_size=N, which splits every expert"),
    "worker_cls": (("auto",), _WORKERS),
    "worker_extension_cls": ((None, ""), _WORKERS),
    "trust_remote_code": ((False, True), ""),  # no remote code is ever run
    "disable_log_stats": ((True, False), ""),
    "load_format": (
        ("auto", "safetensors"),
        "the format of a checkpoint is read from its files; for random weights, use nanoinfer bench --random-model",
    ),
    "config_format": (("auto", "hf"), "a checkpoint needs Hugging Face's config.json"),
    "generation_config": (("auto",), ""),
    "override_generation_config": ((None, {}), "use SamplingParams for each call"),
    "hf_overrides": ((None, {}), "copy the checkpoint, and change its config.json; Qwen3-Reranker needs none"),
    **dict.fromkeys("hf_token download_dir code_revision tokenizer_revision mm_processor_kwargs".split(), ((None,), "")),
    "allowed_local_media_path": (("",), ""),
    "tokenizer_mode": (("auto",), "a checkpoint needs Hugging Face's tokenizer.json"),
    "disable_sliding_window": ((False,), ""),
    "disable_custom_all_reduce": ((False, True), ""),  # there is one device
    "disable_chunked_mm_input": ((False, True), ""),  # there are no images
    "enable_prompt_embeds": ((False,), "prompts are text or token ids; use {'prompt_token_ids': ids}"),
    "enable_sleep_mode": ((False, True), ""),  # sleep() needs no preparation
    "max_cpu_loras": ((None, 1, 2), ""),  # every adapter that was named is kept
    "kv_transfer_config": ((None,), "the KV cache stays in one process; prefix_cache_dir keeps prefixes in files"),
    "profiler_config": ((None,), _PROFILE),
    "limit_mm_per_prompt": ((None, {}), ""),
    "max_logprobs": ((-1,), ""),  # no limit
    "reasoning_config": (
        (None, {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}),
        "thinking_token_budget is for the text between <think> and </think>; leave it out",
    ),
    "reasoning_parser": (
        (None, ""),
        "parse_chat_answer(text) separates reasoning; with a thinking_token_budget a structured output of chat() follows it",
    ),
    "structured_outputs_config": ((None,), "llguidance is the one backend; leave it out"),
    "compilation_config": ((None,), "use enforce_eager=True to run the model's file, or leave it out"),
    "num_gpu_blocks_override": ((None,), "use kv_cache_memory=bytes"),
    "cpu_offload_gb": ((0,), ""),
    "swap_space": ((0, 4), ""),  # GiB that may be swapped out, 4 was vLLM's default
}
_ALL: Neutral = {
    "prompt_token_ids": "prompts",
    "prompt_adapter_request": ((None,), ""),
    "tokenization_kwargs": ((None, {}), ""),
}
_ADAPTER: Neutral = {
    "lora_request": ((None,), "beams and embeddings use the model as it was loaded; use LLM(model, lora=path)")
}
# The arguments by the class or the call that takes them.
NEUTRAL: dict[str, Neutral] = {
    **dict.fromkeys(("LLM()", "AsyncLLM()", "EngineArgs", "AsyncEngineArgs"), _OF_LLM),
    "generate()": _ALL,
    "chat()": {**_ALL, "chat_template_content_format": (("auto", "string"), ""), "mm_processor_kwargs": ((None,), "")},
    "add_request()": {**_ALL, "arrival_time": ((None,), ""), "trace_headers": ((None,), "")},
    "embed()": {**_ALL, **_ADAPTER},
    "score()": {**_ALL, **_ADAPTER},
    "beam_search()": {**_ADAPTER, "use_tqdm": ((False,), ""), "concurrency_limit": ((None,), "")},
    "reset_prefix_cache()": {"reset_running_requests": ((False, True), "")},  # a reset is possible while requests run
    "a prompt": {
        "prompt_embeds": ((None,), "prompts are text or token ids; use {'prompt_token_ids': ids}"),
        "multi_modal_data": ((None,), "no model of nanoinfer reads images, sound or video; use text"),
        "multi_modal_uuids": ((None,), ""),
        "mm_processor_kwargs": ((None,), ""),
        "token_type_ids": ((None,), ""),
    },
    "PoolingParams": {
        "task": ((None, "embed", "score"), _POOLING),
        "use_activation": ((None,), "the checkpoint's modules.json says whether embeddings are normalised"),
    },
    "SamplingParams": {
        "guided_decoding": "structured_outputs",
        "spaces_between_special_tokens": ((True,), ""),
        "flat_logprobs": ((False,), ""),
        "truncate_prompt_tokens": ((None,), "pass the last tokens yourself, prompt_token_ids[-n:]"),
        "skip_reading_prefix_cache": ((None, False), ""),
        "prompt_logprob_token_ids": ((None,), "use prompt_logprobs=-1, which reports all ids"),
        "prompt_logprob_start": ((0, None), "use prompt_logprobs, and leave out the first ones"),
        "trace_decode_token_ids": ((None,), "use LLM.compute_logprobs() for the log-probabilities of given tokens"),
        "stream_interval": ((None, 1), "outputs are delivered as they come; join them"),
        "routed_experts_prompt_start": ((0, None), "nanoinfer does not return the experts of a token"),
        "skip_clone": ((False, True), ""),  # the engine keeps its own copy
    },
    "StructuredOutputsParams": {
        "backend": ((None, "auto", "guidance"), "llguidance is the one backend of structured outputs; leave it out"),
        "disable_fallback": ((False, True), ""),
        "disable_additional_properties": ((False,), ""),
        "whitespace_pattern": ((None,), ""),
        "structural_tag": ((None,), ""),
    },
    "BeamSearchParams": {"temperature": ((0.0,), ""), "include_stop_str_in_output": ((False,), "")},
}

# Sampling parameters of older versions of vLLM, and of transformers -> as in Neutral.
SUCCESSORS: dict[str, tuple[tuple[object, ...], str]] = {
    "do_sample": ((None,), "use temperature=0.0 for greedy answers, a higher temperature to sample"),
    "max_new_tokens": ((None,), "use max_tokens"),
    "best_of": ((None, 1), "use n, and keep the answers with the highest cumulative_logprob"),
    "use_beam_search": ((None, False), "use LLM.beam_search() with BeamSearchParams"),
    "num_beams": ((None, 1), "use LLM.beam_search() with BeamSearchParams"),
    **{
        f"guided_{kind}": ((None,), f"use structured_outputs=StructuredOutputsParams({kind}=...), in HTTP {{'{kind}': ...}}")
        for kind in ("json", "regex", "choice", "grammar")
    },
}

# Methods and attributes of vLLM's LLM and AsyncLLM -> what to do instead.
METHODS = {
    **dict.fromkeys(("encode", "classify", "reward"), _POOLING),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine", "model_config", "vllm_config"), _INSIDE),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("pause_generation", "resume_generation"), _PAUSE),
    "init_weight_transfer_engine": "use LLM.update_weights(pairs), or LLM.update_weights_from_path(folder)",
    "reload_weights": "use LLM.update_weights_from_path(folder)",
    "preprocess_chat": "use llm.render_chat(messages)",
}


def argument_of_vllm(owner: str, name: str, value: object) -> str | None:
    """Return nanoinfer's name for an argument of vLLM, or "" if its value changes nothing. None: vLLM has no such argument.

    owner: the class or the call that was given the argument, a key of NEUTRAL. Raises: UnsupportedError for any other value.
    """
    takes_sampling_params = owner in ("SamplingParams", "generate()", "chat()", "stream()")
    accepted = NEUTRAL.get(owner, {}).get(name) or (SUCCESSORS.get(name) if takes_sampling_params else None)
    if accepted is None or isinstance(accepted, str):
        return accepted
    if not is_one_of(value, accepted[0]):
        hint = accepted[1] or f"leave it out (it acts as {accepted[0][0]!r})"
        raise UnsupportedError(f"{name}={shown(value)} is not supported; {hint}")
    return ""


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an LLM or AsyncLLM lacks, with a hint if vLLM's or our LLM has it."""
    from nanoinfer.llm import LLM

    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in METHODS:
        return UnsupportedAttributeError(f"{text}: {METHODS[name]}")
    if not name.startswith("_") and hasattr(LLM, name) and not isinstance(owner, LLM):
        return UnsupportedAttributeError(f"{text}: use await async_llm.between_steps(lambda: async_llm.llm.{name}(...))")
    return AttributeError(text, name=name, obj=owner)
