"""An answer's text -> what a chat message consists of: content, reasoning, tool calls.

In: pieces of text, as they are generated. Out: ChatDeltas. A stream and a whole answer pass through the same parser, so they
have the same content.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoinfer.server.protocol import ChatCompletionRequest


@dataclass(slots=True)
class ChatDelta:
    """What a piece of text adds to a message. tool_calls: in the shape of OpenAI's chunks, each with its "index"."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """The fields of OpenAI's "delta", without empty ones. Clients read the reasoning under one name or the other."""
        reasoning = {"reasoning": self.reasoning, "reasoning_content": self.reasoning} if self.reasoning else {}
        content = {"content": self.content} if self.content else {}
        return reasoning | content | ({"tool_calls": self.tool_calls} if self.tool_calls else {})

    def message(self) -> dict[str, Any]:
        """The fields of OpenAI's "message", for the delta of a whole answer."""
        message = {"role": "assistant", "refusal": None} | self.fields()
        if self.tool_calls:
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in self.tool_calls]
        return message | {"content": self.content if self.content or not self.tool_calls else None}


class ChatParser(Protocol):
    """Parses one answer. has_tool_calls: whether a ChatDelta had one, so the answer's finish_reason is "tool_calls"."""

    has_tool_calls: bool

    def push(self, text: str, *, is_last: bool) -> ChatDelta:
        """Parse the next piece of text. Text whose meaning is not certain is held back until it is, or until the last piece."""


class PlainParser:
    """Everything is content."""

    has_tool_calls = False

    def push(self, text: str, *, is_last: bool) -> ChatDelta:
        return ChatDelta(content=text)


def make_parser(request: ChatCompletionRequest) -> ChatParser:
    """Make the parser of one answer."""
    return PlainParser()
