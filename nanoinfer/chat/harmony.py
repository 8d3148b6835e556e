"""An answer in the format of gpt-oss (harmony) -> the assistant's message, with the parts of parsing.py.

An answer is a list of messages. Each has a header, which names its channel and perhaps a tool:

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from typing import Literal

from nanoinfer.chat.parsing import LONG_HEADER, ChatParser

CHANNEL, MESSAGE, ASSISTANT = "<|channel|>", "<|message|>", "<|start|>assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"

_MARKS = ("<|start|>", CHANNEL, "<|end|>", "<|call|>", "<|return|>")  # each ends a message
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_CALL = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser(ChatParser):
    """Parses one answer, which must have been generated with skip_special_tokens=False.

    The channel analysis is reasoning, and the others are content. An answer without a header is content.
    """

    end_of_reasoning = "<|end|>"
    _call_end = "<|"  # of any mark

    def __init__(
        self, prompt: str = "", *, reasoning: bool = True, tool_calls: bool = True, parallel_tool_calls: bool = True
    ) -> None:
        """Begin an answer. The arguments are ChatParser's. The prompt may have begun the header, or a message."""
        self._name: Literal["content", "reasoning"] = "content"  # of the message
        super().__init__(reasoning=reasoning, tool_calls=tool_calls, parallel_tool_calls=parallel_tool_calls)
        header, has_begun, _ = prompt.rpartition(ASSISTANT)[2].partition(MESSAGE) if ASSISTANT in prompt else ("", "", "")
        self._parse_next = self._parse_start
        if has_begun:
            self._begin_message(header)
        else:
            self._buffer = header

    def _parse_start(self) -> bool:
        """Parse a header, up to <|message|>. Text that is not a header is content, as is a header that is too long."""
        header, has_begun, rest = self._buffer.partition(MESSAGE)
        text, is_short = header.lstrip(), len(header) < LONG_HEADER
        if not any(text.startswith(begin) or begin.startswith(text) for begin in ("<|", "to=")):
            self._begin_message("")
        elif is_short and has_begun:
            self._buffer = rest
            self._begin_message(header)
        elif is_short:
            return False
        else:
            self._begin_message("")
            self._write("content", self._take(LONG_HEADER))
        return True

    def _begin_message(self, header: str) -> None:
        if (call := _CALL.search(header)) and self._parses_calls:
            self._begin_call(call[1])
            self._parse_next = self._parse_arguments
            return
        self._name = "reasoning" if f"{CHANNEL}analysis" in header and self._parses_reasoning else "content"
        self._whitespace = "\n" if self._name in self._written else ""  # between two messages of one channel
        self._parse_next = self._parse_content

    def _parse_content(self) -> bool:
        """Parse the text of a message, up to the mark that ends it."""
        mark = _MARK.search(self._buffer)
        end = mark.start() if mark else self._buffer.rfind("<")
        may_be_mark = mark or (end >= 0 and any(self._may_begin(one, end) for one in _MARKS))
        self._write(self._name, self._take(end if may_be_mark else len(self._buffer)))
        if mark:
            self._parse_next = self._parse_start
        return mark is not None

    def _parse_call_end(self) -> bool:
        self._parse_next = self._parse_start
        return True
