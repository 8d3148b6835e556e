"""The fields of other servers' requests: which of their values change nothing here, and what to do about the others.

In: the fields of a body that nanoinfer does not have. Out: nothing, or a RequestError that names the field and gives a hint.
Clients often send every field of an API, and the person at the client cannot leave one out. So null is accepted for each of
these names, and so are the values that change nothing.
"""

import difflib
from collections.abc import Collection, Mapping

from nanoinfer.compat.vllm.neutral import NEUTRAL, SUCCESSORS
from nanoinfer.errors import is_one_of, shown
from nanoinfer.server.errors import MAX_ERRORS, RequestError

# Fields that change no answer, whatever their value is: OpenAI's, then ollama's and llama.cpp's, then settings of samplers
# that NEUTRAL_VALUES turns off.
WITHOUT_EFFECT = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "prediction keep_alive timings_per_token id_slot repeat_last_n xtc_threshold dynatemp_exponent mirostat_tau mirostat_eta "
    "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
    # Anthropic's, and those that its and OpenAI's agents send: caching is automatic, and the others are for their services
    "cache_control eager_input_streaming inference_geo user_profile_id workspace_id client_metadata max_tool_calls".split()
)
_FIELDS = ("stream_interval", "truncate_prompt_tokens", "best_of")  # of protocol.py, which SamplingParams does not honour
_OF_PARAMS = {**NEUTRAL["SamplingParams"], **SUCCESSORS}
# The other fields: the values besides null that change nothing here, and the advice. "": leave the field out.
NEUTRAL_VALUES: dict[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(
        "audio moderation prompt_embeds kv_transfer_params container diagnostics access_programs".split(), ((), "")
    ),
    # OpenAI's
    "modalities": ((["text"],), "only text is generated"),
    "verbosity": (("medium",), "ask for the length in a message"),
    "web_search_options": ((), "offer a search as one of tools"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "suffix": (("",), ""),
    "max_completion_tokens": ((), "use max_tokens, or max_output_tokens in /v1/responses"),
    # vLLM's
    **{name: one for name, one in _OF_PARAMS.items() if not isinstance(one, str) and name not in _FIELDS},
    "length_penalty": ((1.0,), "beams are searched by LLM.beam_search in Python"),
    "early_stopping": ((False,), "beams are searched by LLM.beam_search in Python"),
    "documents": (([],), "put them into a message, or into chat_template_kwargs"),
    "chat_template": ((), "the server uses the checkpoint's"),
    "mm_processor_kwargs": ((), "only text is read"),
    "include_reasoning": ((True,), "the reasoning is a field of its own"),
    "logits_processors": (([],), ""),
    # those of Anthropic's Messages and OpenAI's Responses
    "context_management": (({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {"edits": []}), ""),
    "speed": (("standard",), ""),
    "mcp_servers": (([],), "call them from the client, and offer their tools"),
    "citations": (({"enabled": False},), ""),
    "defer_loading": ((False,), ""),
    "input_examples": (([],), "put them into the description"),
    "allowed_callers": ((["direct"],), ""),
    "background": ((False,), ""),
    "background_options": ((), ""),
    "image": ((), ""),
    "conversation": ((), "use previous_response_id, or send the conversation as input"),
    "truncation": (("disabled",), "shorten the input"),
    # ollama's and llama.cpp's
    "options": (({},), "give its fields without options"),
    "think": ((), "use reasoning_effort"),
    "format": (("",), "use response_format"),
    "cache_prompt": ((True,), "serve with --no-enable-prefix-caching"),
    "n_predict": ((), "use max_tokens"),
    "n_keep": ((0,), ""),
    "n_probs": ((0,), "use logprobs"),
    "repeat_penalty": ((1.0,), "use repetition_penalty"),
    "typical_p": ((1.0,), "use top_p or min_p"),
    "tfs_z": ((1.0,), "use top_p or min_p"),
    "top_n_sigma": ((-1.0,), "use top_p or min_p"),
    "xtc_probability": ((0.0,), "use top_p or min_p"),
    "dynatemp_range": ((0.0,), "use temperature"),
    "mirostat": ((0,), "use top_p or min_p"),
    "dry_multiplier": ((0.0,), "use repetition_penalty or no_repeat_ngram_size"),
    "samplers": ((), "the order of the sampling stages is fixed"),
    "grammar": (("",), "use structured_outputs={'grammar': ...}"),
    "json_schema": ((), "use response_format or structured_outputs={'json': ...}"),
}


def check_fields(extra: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse those of a body's extra fields that might be meant to change the answer. known: the fields that are honoured.

    Raises: RequestError, 400, whose param is the first field that is refused.
    """
    refused: dict[str, str] = {}
    for name, value in extra.items():
        if len(refused) == MAX_ERRORS:
            break
        if name in WITHOUT_EFFECT:
            continue
        if name not in NEUTRAL_VALUES:
            close = difflib.get_close_matches(name[:50], known, n=1)
            hint = f"did you mean {close[0]}?" if close else "leave it out, or serve with --ignore-unknown-fields"
            refused[name] = f"{name[:50]} is an unknown field ({hint})"
        elif value is not None and not is_one_of(value, NEUTRAL_VALUES[name][0]):
            refused[name] = f"{name}={shown(value)} is not supported ({NEUTRAL_VALUES[name][1] or 'leave it out'})"
    if refused:
        name = next(iter(refused))
        code = "unsupported" if name in NEUTRAL_VALUES else "unknown_parameter"
        raise RequestError(400, "; ".join(refused.values()), param=name[:50], code=code)
