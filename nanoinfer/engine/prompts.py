"""The kinds of prompts that users write, which engine/inputs.py reads."""

from typing import NotRequired, TypedDict


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
