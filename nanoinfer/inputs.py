"""What goes in: prompts and chat messages, in vLLM's shapes, as plain data.

A prompt is a string, a list of token ids, or one of the two dicts below. LLM accepts one prompt or a list of prompts.
"""

from collections.abc import Mapping
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text: {"prompt": "Once upon a time"}."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids: {"prompt_token_ids": [1, 2, 3]}. The model reads the ids. The text, if given, is only shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]


PromptType = str | list[int] | TextPrompt | TokensPrompt

Message = Mapping[str, object]  # {"role": "user", "content": "Hello"}. The chat template decides which keys it reads
