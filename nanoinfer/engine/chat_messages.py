"""What a chat adds to a prompt: messages whose content is one string, for the chat template, and tool calls that are required.

In: dicts whose content may be a string, a list of text parts or None, tools, SamplingParams. Out: new ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from nanoinfer.sampling_params import SamplingParams, StructuredOutputsParams
from nanoinfer.tokenization.tools import ToolChoice, tool_call_grammar

Message = Mapping[str, object]  # {"role": "user", "content": "Hello"}. The chat template decides which keys it reads.


def with_text_content(messages: Any) -> list[dict[str, Any]]:
    """The messages with their contents as strings: text parts are joined by newlines, as in vLLM, and None is no text.

    Raises: InvalidTypeError, UnsupportedError.

    >>> with_text_content([{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}])
    [{'role': 'user', 'content': 'Hello\\nthere'}]
    """
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidTypeError(
            f'messages must be a list of dicts like {{"role": "user", "content": "Hello"}}, got {shown(messages)}'
        )
    return [
        {key: _text(value, index) if key == "content" else value for key, value in message.items()}
        for index, message in enumerate(messages)
    ]


def constrain_calls(
    params: SamplingParams,
    prompt: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    *,
    parallel_tool_calls: bool = True,
) -> SamplingParams:
    """Return params with the grammar of the calls that are required, or strict.

    tools: as tool_schemas returns them. prompt: the rendered conversation.

    Raises: InvalidTypeError, InvalidValueError.
    """
    grammar = tool_call_grammar(tools, tool_choice, prompt=prompt, parallel_tool_calls=parallel_tool_calls)
    if grammar is None:
        return params
    if params.structured_outputs is not None:
        raise InvalidValueError("structured_outputs cannot be used with required or strict tool calls; use one of them")
    return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple | None):
        raise InvalidTypeError(f"message {index}: content must be a string, a list of text parts or None, got {shown(content)}")
    return "\n".join(_text_of_part(part, index) for part in content or ())


def _text_of_part(part: Any, index: int) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedError(f"message {index}: a part of type {kind!r} is not supported; give text parts only")
    if kind is None or not isinstance(text, str):
        raise InvalidTypeError(
            f'message {index}: a part of content must be {{"type": "text", "text": "..."}}, got {shown(part)}'
        )
    return text
