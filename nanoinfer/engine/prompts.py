"""The kinds of prompts that users write, which engine/inputs.py reads, and vLLM's further arguments of calls with prompts."""

from typing import NotRequired, TypedDict

from nanoinfer.arguments import Neutral


class TextPrompt(TypedDict):
    """A prompt as text: {"prompt": "Once upon a time"}. Only requests with the same cache_salt share cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids: {"prompt_token_ids": [1, 2, 3]}. The model reads the ids. The text, if given, is only shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


class ChatPrompt(TokensPrompt):
    """A rendered conversation. eos_token_ids: ids that end its answer, as the model's EOS ids do."""

    eos_token_ids: NotRequired[list[int]]


PromptType = str | list[int] | TextPrompt | TokensPrompt

_ALL: Neutral = {
    "prompt_token_ids": "prompts",
    "prompt_adapter_request": ((None,), ""),
    "tokenization_kwargs": ((None, {}), ""),
}
_ADAPTER: Neutral = {
    "lora_request": ((None,), "beams and embeddings use the model as it was loaded; use LLM(model, lora=path)"),
}
# vLLM's further arguments of each call: the values that change nothing, and the advice for any other value.
NEUTRAL_IN: dict[str, Neutral] = {
    "generate()": _ALL,
    "chat()": {
        **_ALL,
        "chat_template_content_format": (("auto", "string"), ""),
        "mm_processor_kwargs": ((None,), ""),
    },
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
}
