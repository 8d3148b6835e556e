"""Parse an answer in the format of gpt-oss (harmony) into the assistant's message, as the deltas of parsing.py.

An answer is a list of messages. Each has a header, which names its channel and perhaps a tool:

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

Source: https://cookbook.openai.com/articles/openai-harmony.
"""

import re
from typing import Literal

from nanoinfer.features.chat.parsing import LONG_HEADER, ChatParser

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
MARKS = ("<|start|>", CHANNEL, "<|constrain|>", MESSAGE, "<|end|>")  # the marks before the last mark of an answer
FINAL = f"{CHANNEL}final{MESSAGE}"

_OPENING, _CLOSING = ("<|start|>", CHANNEL), ("<|end|>", "<|call|>", "<|return|>")  # each of _CLOSING ends a message
_MARK = re.compile("|".join(map(re.escape, _OPENING + _CLOSING)))
_CALL = re.compile(r"to=functions\.([^\s<]+)")
# The end of a prompt that has begun a message: a header, and perhaps <|message|> and text.
_BEGUN = re.compile(r"assistant((?:[^<]|<\|channel\|>|<\|constrain\|>)*)(<\|message\|>(?:(?!<\|\w+\|>).)*)?", re.DOTALL)


def begun_message(prompt: str) -> re.Match[str] | None:
    """Match the message that the end of a prompt begins. Group 1 is its header. Group 2 exists if the header is complete."""
    _, has_messages, last = prompt.rpartition("<|start|>")
    return _BEGUN.fullmatch(last) if has_messages else None


class HarmonyParser(ChatParser):
    """Parses one answer, which must have been generated with skip_special_tokens=False.

    The channel analysis is reasoning, others are content. Messages of the same kind are joined by newlines. Text without a
    header is content. A header without a message at the end of the answer is dropped.
    """

    end_of_reasoning = "<|end|>"  # ends the first message
    _call_end = "<|"  # the beginning of any mark

    def __init__(self, prompt: str = "", **options: bool) -> None:
        """Begin an answer, with the arguments of ChatParser. The prompt may have begun a header or a message."""
        super().__init__("", **options)
        self._name: Literal["content", "reasoning"] = "content"  # what the current message becomes
        self._separator = ""  # precedes the current message's text
        if (begun := begun_message(prompt)) and begun[2]:
            self._begin_message(begun[1])
        elif begun:
            self._buffer = begun[1]

    def _parse_start(self) -> bool:
        """Parse a header, up to <|message|>. Text that is not a header is content, as is a header that is too long."""
        header, is_complete, rest = self._buffer.partition(MESSAGE)
        text = header.lstrip()
        heads = (*_OPENING, "to=") if is_complete or not self._is_last else _OPENING
        is_header = text.startswith(heads)
        may_be_header = is_header or not text or (not self._is_last and any(head.startswith(text) for head in heads))
        if is_header and is_complete and len(header) <= LONG_HEADER:
            self._buffer = rest
            self._begin_message(header)
        elif may_be_header and not is_complete and len(header) < LONG_HEADER + len(MESSAGE):
            return False
        else:
            self._begin_message("")
            self._say(self._take(len(header) - len(text) + 1 if is_header else 0))  # the rest does not begin with a mark
        return True

    def _begin_message(self, header: str) -> None:
        if (call := _CALL.search(header)) and self._parses_calls:
            self._begin_call(call[1])
            self._parse_next = self._parse_arguments
            return
        self._name = "reasoning" if f"{CHANNEL}analysis" in header and self._parses_reasoning else "content"
        self._separator = "\n" if self._name in self._written else ""
        self._parse_next = self._parse_content

    def _parse_content(self) -> bool:
        """Parse the text of a message."""
        text, is_complete = self._take_message()
        self._say(text)
        return is_complete

    def _parse_call_end(self) -> bool:
        """Drop the text between a call's arguments and the next mark."""
        return self._take_message()[1]

    def _say(self, text: str) -> None:
        if text:
            delta = self._delta(self._name)
            setattr(delta, self._name, getattr(delta, self._name) + self._separator + text)
            self._separator = ""
            self._written.add(self._name)

    def _take_message(self) -> tuple[str, bool]:
        """Take the text up to a mark, or all text that cannot be part of a mark. Also returns whether there is a mark."""
        if mark := _MARK.search(self._buffer):
            text = self._take(mark.start())
            self._take(len(mark[0]) if mark[0] in _CLOSING else 0)
            self._parse_next = self._parse_start
            return text, True
        start = self._buffer.rfind("<")
        may_be_mark = start >= 0 and any(self._may_begin(mark, start) for mark in _OPENING + _CLOSING)
        return self._take(start if may_be_mark else len(self._buffer)), False
