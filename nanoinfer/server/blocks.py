"""An answer as a list of blocks, whole or as named events, for /v1/messages and /v1/responses.

In: the text of an answer, from which a ChatParser makes reasoning, content and tool calls. Out: Blocks, and server-sent events
for each block that begins, grows or ends. messages.py and responses.py have the JSON of the blocks and the events.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pydantic_core import to_json

from nanoinfer.features.chat.parsing import ChatDelta, ChatParser, ToolCall
from nanoinfer.outputs import CompletionOutput, Delta
from nanoinfer.server.answers import Reply
from nanoinfer.server.async_llm import RequestStream
from nanoinfer.server.choices import ChatFormat
from nanoinfer.server.protocol import ChatCompletionRequest, JsonObject

Change = Literal["begins", "grows", "ends"]
CUT = ("length", "repetition")  # the reasons of an answer that ends within a block


@dataclass
class Block:
    """A part of an answer.

    kind: "reasoning", "content" or "call". call_id, name: the call's id and tool. pieces: the text or JSON, as it grows.
    is_cut: whether the answer was cut within the block.
    """

    kind: str
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Blocks:
    """The blocks of an answer so far. Every split of a text into pieces gives the same blocks."""

    def __init__(self, parser: ChatParser, *, keeps_reasoning: bool = True) -> None:
        self.all: list[Block] = []
        self.parser = parser
        self._keeps_reasoning = keeps_reasoning

    def push(self, text: str, finish_reason: str | None = None) -> Iterator[tuple[Change, Block, str]]:
        """Parse the next piece of text, and yield each change of a block, with its new text if it grows.

        finish_reason: the answer's finish_reason, given with the last piece. None: more pieces follow.
        """
        for delta in self.parser.push_deltas(text, is_last=finish_reason is not None):
            for kind, call, new in _pieces(delta):
                if kind == "reasoning" and not self._keeps_reasoning:
                    continue
                if not self.all or kind != self.all[-1].kind or "id" in call:
                    if self.all:
                        yield "ends", self.all[-1], ""
                        new = new.lstrip() if kind == "content" else new  # whitespace between blocks is dropped
                    name = call["function"]["name"] if call else ""
                    self.all.append(Block(kind, len(self.all), call.get("id", ""), name))
                    yield "begins", self.all[-1], ""
                if new:
                    self.all[-1].pieces.append(new)
                    yield "grows", self.all[-1], new
        if finish_reason is not None and self.all:
            self.all[-1].is_cut = finish_reason in CUT
            yield "ends", self.all[-1], ""


def _pieces(delta: ChatDelta) -> Iterator[tuple[str, ToolCall, str]]:
    """Yield the kind of block, the tool call if it is a call, and the text."""
    for call in delta.tool_calls:
        yield "call", call, call["function"]["arguments"]
    if delta.reasoning:
        yield "reasoning", {}, delta.reasoning
    if delta.content:
        yield "content", {}, delta.content


class BlockReply(Reply):
    """The reply of an endpoint whose answers are blocks. A request has a single answer, because neither API has n."""

    keeps_reasoning = True  # whether the answer has blocks of reasoning

    def __init__(self, chat: ChatCompletionRequest, chat_format: ChatFormat, model: str) -> None:
        super().__init__()
        self.chat, self.chat_format, self.model = chat, chat_format, model
        self.has_begun = False  # whether the stream has an event

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the answer so far."""
        prompt = self.answers.streams[0].prepared.prompt or ""
        return Blocks(self.chat_format.make_parser(self.chat, prompt), keeps_reasoning=self.keeps_reasoning)

    @abstractmethod
    def message(self, answer: CompletionOutput | Delta) -> JsonObject:
        """Return the JSON object of the answer so far, or of the whole answer, which has a finish_reason."""

    @abstractmethod
    def delta_events(self, delta: Delta) -> Iterator[JsonObject]:
        """Yield the events for the next delta. Unless has_begun, the first events of the stream precede them."""

    def whole(self) -> JsonObject:
        [answer] = self.answers.outputs[0].outputs
        for _ in self.blocks.push(answer.text, answer.finish_reason):
            pass
        return self.message(answer)

    def chunks(self, index: int, stream: RequestStream, delta: Delta) -> Iterator[bytes]:
        yield render(self.delta_events(delta))
        self.has_begun = True


def render(events: Iterable[JsonObject]) -> bytes:
    """Return the bytes of named events."""
    return b"".join(f"event: {event['type']}\ndata: ".encode() + to_json(event) + b"\n\n" for event in events)
