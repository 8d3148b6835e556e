"""An answer as a list of blocks, whole or as named events, for /v1/messages and /v1/responses.

In: the text of an answer, from which a ChatParser makes reasoning, content and tool calls. Out: Blocks, and server-sent events
for each block that begins, grows or ends. messages.py and responses.py have the JSON of the blocks and the events.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pydantic_core import to_json

from nanoinfer.chat.parsing import ChatDelta, ChatParser, ToolCall
from nanoinfer.outputs import CompletionOutput, Delta
from nanoinfer.server.answers import Answers, failure_of
from nanoinfer.server.choices import ChatFormat
from nanoinfer.server.protocol import ChatCompletionRequest, JsonObject

Change = Literal["begins", "grows", "ends"]


@dataclass
class Block:
    """A part of an answer.

    kind: "reasoning", "content" or "call". call_id, name: those of a call. pieces: the text or a call's JSON, as it grows.
    is_cut: whether the answer ended within the block because it became too long.
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
        """Parse the next piece of text, and yield each change of a block, with the new text of one that grows.

        finish_reason: the answer's, with its last piece. None: the answer goes on.
        """
        for part in self.parser.push_parts(text, is_last=finish_reason is not None):
            for kind, call, new in _pieces(part):
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
            self.all[-1].is_cut = finish_reason == "length"
            yield "ends", self.all[-1], ""


def _pieces(part: ChatDelta) -> Iterator[tuple[str, ToolCall, str]]:
    """Yield the kind of block, the tool call if it is a call, and the text."""
    for call in part.tool_calls:
        yield "call", call, call["function"]["arguments"]
    if part.reasoning:
        yield "reasoning", {}, part.reasoning
    if part.content:
        yield "content", {}, part.content


class BlockReply(ABC):
    """The reply of an endpoint whose answers are blocks. A request has a single answer, because neither API has n."""

    def __init__(
        self, chat: ChatCompletionRequest, chat_format: ChatFormat, model: str, *, keeps_reasoning: bool = True
    ) -> None:
        self.chat, self.model = chat, model
        self._format, self._keeps_reasoning = chat_format, keeps_reasoning

    @abstractmethod
    def message(self, answers: Answers, blocks: Blocks, answer: CompletionOutput | Delta) -> JsonObject:
        """Return the JSON object of the answer so far, or of the whole answer, which has a finish_reason."""

    @abstractmethod
    def begin(self, answers: Answers, blocks: Blocks, delta: Delta) -> list[JsonObject]:
        """Return the events before the blocks."""

    @abstractmethod
    def change(self, answers: Answers, change: Change, block: Block, new: str) -> list[JsonObject]:
        """Return the events of a block that begins, grows by new text, or ends."""

    @abstractmethod
    def end(self, answers: Answers, blocks: Blocks, delta: Delta) -> list[JsonObject]:
        """Return the events after the blocks."""

    @abstractmethod
    def failure(self, answers: Answers, status: int, message: str) -> list[JsonObject]:
        """Return the last events of an answer that has failed."""

    def whole(self, answers: Answers) -> JsonObject:
        [output] = answers.outputs
        [answer] = output.outputs
        blocks = self._blocks(output.prompt)
        for _ in blocks.push(answer.text, answer.finish_reason):
            pass
        return self.message(answers, blocks, answer)

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        blocks = None
        async for updates in answers:
            events: list[JsonObject] = []
            for _, stream, delta in updates:
                if failure := failure_of(delta):
                    yield b"".join(map(_render, events + self.failure(answers, *failure)))
                    return
                if blocks is None:
                    blocks = self._blocks(stream.prepared.prompt)
                    events += self.begin(answers, blocks, delta)
                for change, block, new in blocks.push(delta.text, delta.finish_reason):
                    events += self.change(answers, change, block, new)
                if delta.finish_reason is not None:
                    events += self.end(answers, blocks, delta)
            if events:
                yield b"".join(map(_render, events))

    def _blocks(self, prompt: str | None) -> Blocks:
        return Blocks(self._format.make_parser(self.chat, prompt or ""), keeps_reasoning=self._keeps_reasoning)


def _render(event: JsonObject) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + to_json(event) + b"\n\n"
