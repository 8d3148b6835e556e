"""Parse an answer's text into the assistant's message: content, reasoning, tool calls.

In: pieces of text, as they are generated. Out: ChatDeltas in the shapes of OpenAI's API. A stream and a whole answer pass
through the same parser, so every split of a text gives the same message, if tags are in pairs. The format is Qwen3's (hermes):

    <think>
    reasoning
    </think>

    content
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A block may hold several calls, one after the other or in lists. Some models write "parameters" for "arguments".

transformers' ResponseParser (from 5.16) reads this format too. It returns a call when the call is complete, raises on malformed
JSON, and ends a call at a </tool_call> inside a JSON string. This parser streams arguments as they are written, and text that
is not a call stays content.
"""

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

THINK, END_THINK, TOOL_CALL, END_TOOL_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"

LONG_HEADER = 1024  # in characters. The beginning of a longer call is not parsed at every token

# The beginning of a call whose arguments can be streamed, after the end of another call. Other calls are read when the block is
# complete: those with another order of keys, and those with "parameters", which "arguments" may follow.
CALL_HEADER = re.compile(r'[\s,\[\]}]*\{\s*"name"\s*:\s*"([^"\\<]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_BETWEEN_CALLS = re.compile(r"[\s,\[\]}]*")
_JSON = json.JSONDecoder(strict=False)


class ToolCall(TypedDict, total=False):
    """What a piece of text adds to a call, as in OpenAI's chunks. The first piece of a call has its id and its name."""

    index: int  # the index of the call in the message
    id: str
    type: str
    function: dict[str, str]


@dataclass(slots=True)
class ChatDelta:
    """What a piece of text adds to a message.

    The arguments of all deltas of a call, joined, are the arguments as the model wrote them.
    """

    content: str = ""  # what the user reads
    reasoning: str = ""  # the text in the think block
    tool_calls: list[ToolCall] = field(default_factory=list)

    def fields(self) -> dict[str, object]:
        """The fields of OpenAI's "delta", without empty ones. Some clients read "reasoning", others "reasoning_content"."""
        reasoning = {"reasoning": self.reasoning, "reasoning_content": self.reasoning} if self.reasoning else {}
        content = {"content": self.content} if self.content else {}
        return reasoning | content | ({"tool_calls": self.tool_calls} if self.tool_calls else {})

    def message(self) -> dict[str, Any]:
        """The fields of OpenAI's "message", for the delta of a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "refusal": None, **self.fields()}
        if self.tool_calls:
            message["tool_calls"] = [{name: item for name, item in call.items() if name != "index"} for call in self.tool_calls]
        return message | {"content": self.content if self.content or not self.tool_calls else None}


class ChatParser:
    """Parses one answer.

    Whitespace next to a tag belongs to the tag, unless it separates two pieces of content. Without tags, all text is
    content. Malformed JSON after a call's name and the opening brace of its arguments stays there, as in OpenAI's API. A
    </think> that no tag began ends reasoning if the answer comes as one piece. In a stream the text before it stays content.

    Attributes:
        has_tool_calls: whether a call is complete.
        end_of_reasoning: the text of the token that ends the reasoning.
    """

    end_of_reasoning = END_THINK
    _call_end = END_TOOL_CALL

    def __init__(
        self, prompt: str = "", *, reasoning: bool = True, tool_calls: bool = True, parallel_tool_calls: bool = True
    ) -> None:
        """Begin an answer.

        Args:
            prompt: the rendered prompt. Some chat templates end it with <think>.
            reasoning: whether to parse a think block. If False, it is content.
            tool_calls: whether to parse tool calls. If False, they are content.
            parallel_tool_calls: if False, calls after the first are dropped.
        """
        self.has_tool_calls = False
        self._parses_reasoning, self._parses_calls = reasoning, tool_calls
        self._keeps_later_calls = parallel_tool_calls
        self._num_calls = 0
        self._buffer = ""  # text that is not parsed yet
        self._held: list[str] = []  # later text that was not looked at yet, and its length
        self._num_held = 0
        self._is_last = False
        self._deltas: list[ChatDelta] = []
        self._whitespace = ""  # the whitespace after the latest content or reasoning, which may belong to a tag
        self._is_after_tag = reasoning and opens_thinking(prompt)
        self._may_think = reasoning and not closes_thinking(prompt)
        self._written: set[str] = set()  # subset of {"content", "reasoning"}
        self._parse_next: Callable[[], bool] = self._parse_reasoning if self._is_after_tag else self._parse_start
        # the state of the JSON in a call's arguments
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def push(self, text: str, *, is_last: bool = False) -> ChatDelta:
        """Parse the next piece of text. Ambiguous text is held back until its meaning is certain, or until the last piece."""
        merged = ChatDelta()
        for delta in self.push_deltas(text, is_last=is_last):
            merged.content += delta.content
            merged.reasoning += delta.reasoning
            merged.tool_calls += delta.tool_calls
        return merged

    def push_deltas(self, text: str, *, is_last: bool = False) -> list[ChatDelta]:
        """Parse like push, and return the deltas in the order of the text. Each has reasoning, content or tool calls."""
        self._held.append(text)
        self._num_held += len(text)
        self._is_last = is_last
        self._deltas = []
        if self._waits_for_more():
            return self._deltas
        self._buffer += "".join(self._held)
        self._held, self._num_held = [], 0
        while self._parse_next():
            pass
        if is_last and self._parse_next == self._parse_content and not self._is_after_tag and self._whitespace:
            self._delta("content").content += self._whitespace
        return self._deltas

    def _waits_for_more(self) -> bool:
        """Whether to put off the next search of a call's long beginning, until it has grown by an eighth."""
        is_long = self._parse_next in (self._parse_call, self._parse_call_end) and len(self._buffer) > LONG_HEADER
        return is_long and not self._is_last and self._num_held < len(self._buffer) // 8

    # ---- the parser's states. Each returns whether another of them can continue with the buffer.

    def _parse_start(self) -> bool:
        """Parse a think block, which can only be at the very beginning."""
        text = self._buffer.lstrip()
        before, end, _ = text.partition(END_THINK)
        ends_thought = self._is_last and end and self._may_think and THINK not in before and TOOL_CALL not in before
        if ends_thought or (self._parses_reasoning and text.startswith(THINK)):
            self._buffer = text.removeprefix(THINK)
            self._is_after_tag = True
            self._parse_next = self._parse_reasoning
            return True
        if self._parses_reasoning and THINK.startswith(text) and not self._is_last:
            return False
        self._parse_next = self._parse_content
        return True

    def _parse_reasoning(self) -> bool:
        text, is_complete = self._take_until(END_THINK)
        self._write("reasoning", text)
        if is_complete:
            self._whitespace, self._is_after_tag = "", True
            self._parse_next = self._parse_content
        return is_complete

    def _parse_content(self) -> bool:
        if not self._parses_calls:
            self._write("content", self._buffer)
            self._buffer = ""
            return False
        text, is_complete = self._take_until(TOOL_CALL)
        self._write("content", text)
        if is_complete:
            self._parse_next = self._parse_call
        return is_complete

    def _parse_call(self, *, is_first: bool = True) -> bool:
        """Parse the text after <tool_call>, or after a call, up to the next arguments that can be streamed or </tool_call>."""
        if header := CALL_HEADER.match(self._buffer):
            self._buffer = self._buffer[header.end() :]
            self._begin_call(header[1])
            self._parse_next = self._parse_arguments
            return True
        body, end, rest = self._buffer.partition(END_TOOL_CALL)
        may_have_calls = not is_first or _BETWEEN_CALLS.sub("", body, count=1)[:1] in ("", "{")
        if may_have_calls and not end and not self._is_last:
            return False
        calls, unread = _read_calls(body if is_first else _without_rest_of_object(body)) if may_have_calls else ([], "")
        for name, arguments in calls:
            self._begin_call(name)
            self._add_arguments(arguments)
            self.has_tool_calls = True
        if is_first and not calls:  # the tag and the text up to the next tag are content
            self._write("content", TOOL_CALL)
        else:
            self._buffer = rest
            self._write("content", "" if END_TOOL_CALL.startswith(unread) else unread)  # it may be cut in the tag
        self._parse_next = self._parse_content
        return True

    def _parse_arguments(self) -> bool:
        """Parse the JSON object of the arguments, which is passed on as it is written."""
        for position, char in enumerate(self._buffer):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                else:
                    self._is_escaped = char == "\\"
                    self._is_in_string = char != '"'
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._add_arguments(self._take(position + 1))
                    self.has_tool_calls = True
                    self._parse_next = self._parse_call_end
                    return True
            elif char == "<" and self._may_begin(self._call_end, position):  # the JSON is malformed
                self._add_arguments(self._take(position))
                if not self._buffer.startswith(self._call_end):
                    return False
                self._depth = 0
                self._parse_next = self._parse_call_end
                return True
        self._add_arguments(self._take(len(self._buffer)))
        return False

    def _parse_call_end(self) -> bool:
        """Parse the text between a call's arguments and </tool_call>, which may have further calls."""
        return self._parse_call(is_first=False)

    # ---- the buffer

    def _take(self, num_characters: int) -> str:
        text, self._buffer = self._buffer[:num_characters], self._buffer[num_characters:]
        return text

    def _take_until(self, tag: str) -> tuple[str, bool]:
        """Take the text before a tag, and the tag, or all text that is part of no tag. Also returns whether there is a tag."""
        text, found, rest = self._buffer.partition(tag)
        if found:
            self._buffer = rest
            return text, True
        start = text.rfind("<")
        return self._take(start if start >= 0 and self._may_begin(tag, start) else len(text)), False

    def _may_begin(self, tag: str, position: int) -> bool:
        """Whether a tag is at this position of the buffer, or can be when more text has come."""
        text = self._buffer[position : position + len(tag)]
        return text == tag or (tag.startswith(text) and not self._is_last)

    # ---- the deltas

    def _delta(self, name: str) -> ChatDelta:
        """Return the latest delta if it has this field, or add a delta."""
        if not self._deltas or not getattr(self._deltas[-1], name):
            self._deltas.append(ChatDelta())
        return self._deltas[-1]

    def _write(self, name: Literal["content", "reasoning"], text: str) -> None:
        """Add text, and hold back the whitespace at its end."""
        text = self._whitespace + text
        visible = text.rstrip()
        self._whitespace = text[len(visible) :]
        if not visible:
            return
        if self._is_after_tag and name not in self._written:
            visible = visible.lstrip()
        self._written.add(name)
        self._is_after_tag = False
        delta = self._delta(name)
        setattr(delta, name, getattr(delta, name) + visible)

    @property
    def has_reasoning(self) -> bool:
        """Whether the answer has reasoning so far."""
        return "reasoning" in self._written

    @property
    def _is_dropped(self) -> bool:
        return self._num_calls > 1 and not self._keeps_later_calls

    def _begin_call(self, name: str) -> None:
        self._is_after_tag = True
        self._num_calls += 1
        if not self._is_dropped:
            function = {"name": name, "arguments": ""}
            call_id = f"call_{uuid.uuid4().hex}"
            self._delta("tool_calls").tool_calls.append(
                {"index": self._num_calls - 1, "id": call_id, "type": "function", "function": function}
            )

    def _add_arguments(self, text: str) -> None:
        if self._is_dropped or not text:
            return
        calls, index = self._delta("tool_calls").tool_calls, self._num_calls - 1
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text


def parse_chat_answer(text: str, prompt: str = "") -> dict[str, Any]:
    """Parse a whole answer, in the format of Qwen3 (hermes) or gpt-oss, into an assistant message for the conversation.

    >>> parse_chat_answer("<think>\\nEasy.\\n</think>\\n\\nFour.")["content"]
    'Four.'

    Args:
        text: the text of an answer of LLM.chat. For gpt-oss, it needs SamplingParams(skip_special_tokens=False).
        prompt: RequestOutput.prompt. Some chat templates end it with <think>.

    Returns:
        A dict like OpenAI's message: role, content, and if the answer has them, reasoning and tool_calls. Each tool call is
        {"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}.
    """
    from nanoinfer.features.chat.harmony import CHANNEL, FINAL, HarmonyParser, begun_message

    if prompt.endswith(FINAL):  # a structured output follows, where marks are plain text
        return ChatParser(reasoning=False, tool_calls=False).push(text, is_last=True).message()
    is_harmony = text.startswith(CHANNEL) or begun_message(prompt) is not None
    return (HarmonyParser if is_harmony else ChatParser)(prompt).push(text, is_last=True).message()


def calls_as_hermes(template: str) -> bool:
    """Whether a chat template writes tool calls in this format. Qwen3-Coder and others write XML into the same tags."""
    return TOOL_CALL in template and re.search(r'\\?"arguments\\?"', template) is not None


def opens_thinking(prompt: str) -> bool:
    """Whether the prompt ends with <think>, so that the answer begins in the think block."""
    return prompt.rstrip().endswith(THINK)


def closes_thinking(prompt: str) -> bool:
    """Whether the prompt ends with </think>: some templates write an empty think block, so that the answer has none."""
    return prompt.rstrip().endswith(END_THINK)


def _read_calls(body: str) -> tuple[list[tuple[str, str]], str]:
    """Return the name and the arguments of each call in a block, and the text that is not a call."""
    calls, unread, end = list[tuple[str, str]](), "", 0
    while True:
        start = _BETWEEN_CALLS.match(body, end).end()  # type: ignore[union-attr]  # it matches ""
        try:
            value, end = _JSON.raw_decode(body, start)
        except (ValueError, RecursionError):  # no JSON, or the end
            return calls, (unread + body[start:]).strip()
        if call := _read_call(value):
            calls.append(call)
        else:
            unread += body[start:end] + "\n"


def _read_call(call: Any) -> tuple[str, str] | None:
    """Return a call's name and arguments, from an object in any key order. The arguments may be JSON in a string."""
    try:
        arguments = call.get("parameters") if call.get("arguments") is None else call["arguments"]
        arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments or {}
    except (ValueError, AttributeError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _without_rest_of_object(body: str) -> str:
    """Drop the keys of an object after the value before this text, and its closing brace."""
    opening = '{"": 0'
    try:
        return body[_JSON.raw_decode(opening + body)[1] - len(opening) :]
    except (ValueError, RecursionError):  # no brace follows
        return body
