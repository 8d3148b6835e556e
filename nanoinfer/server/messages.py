"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

In: a body of that API, which becomes a chat request. Out: an answer as a message of content blocks, whole or as events.
"""

import math
import sys
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json

from nanoinfer.outputs import CompletionOutput, Delta
from nanoinfer.server import protocol
from nanoinfer.server.blocks import Block, BlockReply, render
from nanoinfer.server.choices import ChatFormat
from nanoinfer.server.errors import RequestError, error_body

SIGNATURE = "none"  # in thinking blocks. Anthropic's service checks its signatures, and clients drop a block without one


StopSequence = Annotated[protocol.StopString, Field(min_length=1)]


class TextBlock(protocol.Lenient):
    type: Literal["text"]
    text: str


class ThinkingBlock(protocol.Lenient):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(protocol.Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: protocol.JsonObject


TextContent = protocol.text_or(Annotated[TextBlock, protocol.check_type("a block", "text")])


class ToolResultBlock(protocol.Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent | None = None
    is_error: bool | None = None


ContentBlock = protocol.one_of(
    "a block", text=TextBlock, thinking=ThinkingBlock, tool_use=ToolUseBlock, tool_result=ToolResultBlock
)


class Message(protocol.Lenient):
    role: Literal["user", "assistant", "system"]
    content: protocol.text_or(ContentBlock)


class Tool(protocol.Body):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: protocol.JsonObject
    strict: bool | None = None


class ToolChoice(protocol.Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"the type tool needs the name of one of tools, and other types have no name, got {self.name!r}")
        return self


class Thinking(protocol.Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(protocol.Body):
    type: Literal["json_schema"]
    schema_: Annotated[protocol.JsonObject, Field(alias="schema")]


class OutputConfig(protocol.Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class _Conversation(protocol.ModelBody):
    """The fields that become the prompt."""

    model_config = ConfigDict(json_schema_extra=protocol.add_accepted_fields)

    messages: Annotated[list[Message], Field(min_length=1, max_length=protocol.MAX_MESSAGES, fail_fast=True)]
    system: TextContent | None = None
    tools: protocol.list_of_tools(Tool) | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[protocol.JsonObject, BeforeValidator(protocol.few_items)] | None = None
    thread: protocol.JsonObject | None = None


class CountTokensRequest(_Conversation):
    """The body of /v1/messages/count_tokens."""


class MessagesRequest(_Conversation, protocol.SamplingRequest):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopSequence], Field(max_length=protocol.MAX_STOPS, fail_fast=True)] | None = None


def to_chat(body: CountTokensRequest | MessagesRequest, *, ends_reasoning: bool = False) -> protocol.ChatCompletionRequest:
    """Return the chat request with the meaning of a body. Raises: RequestError, 400.

    ends_reasoning: whether the model can be held to a thinking_token_budget. If not, budget_tokens has no effect.
    """
    if body.thread is not None:  # also where unknown fields are ignored, because a thread's messages would be missing
        message = "thread is not supported; send the whole conversation as messages"
        raise RequestError(400, message, param="thread", code="thread_unsupported_request")  # the client then does so
    messages = [chat for message in body.messages for chat in _chat_messages(message)]
    system: list[protocol.JsonObject] = (
        [] if body.system is None else [{"role": "system", "content": protocol.joined(body.system)}]
    )
    tools = [_function(tool) for tool in body.tools or () if isinstance(tool, Tool)]
    fields: protocol.JsonObject = {"messages": [*system, *messages], "tools": tools}
    if not messages:
        raise RequestError(400, "messages has no content; give a text, or at least one block", param="messages")
    if messages[-1]["role"] == "assistant":  # the answer continues it, as in Anthropic's API
        if messages[-1].get("tool_calls"):
            raise RequestError(400, "messages must not end with a tool_use block; add its tool_result", param="messages")
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    variables = body.chat_template_kwargs or {}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        variables = {"enable_thinking": thinks} | variables
        budget = body.thinking.budget_tokens if thinks else 0
        if ends_reasoning and budget is not None:
            fields["thinking_token_budget"] = budget
    fields["chat_template_kwargs"] = variables
    config = body.output_config or OutputConfig()
    fields["reasoning_effort"] = config.effort
    if config.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
    if isinstance(body, MessagesRequest):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return protocol.chat_request(body, fields)


def _chat_messages(message: Message) -> Iterator[protocol.JsonObject]:
    """Yield the chat messages of a message. Each tool result becomes a message of its own."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    kinds = {"assistant": (TextBlock, ThinkingBlock, ToolUseBlock), "user": (TextBlock, ToolResultBlock)}
    if wrong := [block for block in blocks if not isinstance(block, kinds.get(message.role, TextBlock))]:
        raise RequestError(400, f"a {wrong[0].type} block cannot be in a message of the role {message.role}", param="messages")
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        if isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": protocol.joined(texts)}
                texts = []
            text = protocol.joined(block.content or "")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    more = ({"reasoning": "\n".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
    if texts or more:
        yield {"role": message.role, "content": protocol.joined(texts), **more}


def _call(block: ToolUseBlock) -> protocol.JsonObject:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _function(tool: Tool) -> protocol.JsonObject:
    given = tool.model_dump(include={"description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema} | given}


class MessagesReply(BlockReply):
    """The reply of /v1/messages."""

    response_format = "output_config.format"

    def __init__(
        self, body: MessagesRequest, chat: protocol.ChatCompletionRequest, chat_format: ChatFormat, model: str
    ) -> None:
        super().__init__(chat, chat_format, model)
        self.keeps_reasoning = body.thinking is None or body.thinking.display != "omitted"

    def message(self, answer: CompletionOutput | Delta) -> protocol.JsonObject:
        head = {"id": f"msg_{self.answers.id}", "type": "message", "role": "assistant", "model": self.model}
        content = [_json_of(block) for block in self.blocks.all]
        return head | {"content": content} | self._stop(answer) | {"usage": self._usage()}

    def delta_events(self, delta: Delta) -> Iterator[protocol.JsonObject]:
        if not self.has_begun:
            yield {"type": "message_start", "message": self.message(delta) | {"stop_reason": None, "stop_sequence": None}}
        for change, block, new in self.blocks.push(delta.text, delta.finish_reason):
            at = {"index": block.index}
            kind, name = {
                "reasoning": ("thinking_delta", "thinking"),
                "content": ("text_delta", "text"),
                "call": ("input_json_delta", "partial_json"),
            }[block.kind]
            if change == "begins":
                empty = _json_of(block) | ({"signature": ""} if block.kind == "reasoning" else {})
                yield {"type": "content_block_start", **at, "content_block": empty}
            elif change == "grows":
                yield {"type": "content_block_delta", **at, "delta": {"type": kind, name: new}}
            else:
                if block.kind == "reasoning":
                    yield {"type": "content_block_delta", **at, "delta": {"type": "signature_delta", "signature": SIGNATURE}}
                yield {"type": "content_block_stop", **at}
        if delta.finish_reason is not None:
            yield {"type": "message_delta", "delta": self._stop(delta), "usage": self._usage()}
            yield {"type": "message_stop"}

    def failure(self, error: RequestError) -> bytes:
        return render([error_body(error.status_code, error.detail, param=error.param, path="/v1/messages")])

    def _stop(self, answer: CompletionOutput | Delta) -> protocol.JsonObject:
        reason, sequence = "end_turn", None
        if answer.finish_reason == "length":
            is_full = self.answers.usage()["completion_tokens"] < (self.chat.max_tokens or 0)
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif answer.finish_reason == "repetition":
            reason = "max_tokens"  # of the API's reasons, the one of a cut answer
        elif isinstance(answer.stop_reason, str):
            reason, sequence = "stop_sequence", answer.stop_reason
        elif self.blocks.parser.has_tool_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _usage(self) -> protocol.JsonObject:
        usage = self.answers.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _json_of(block: Block) -> protocol.JsonObject:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    try:
        arguments = from_json(block.text or "{}", allow_partial=True)  # Anthropic's client parses a truncated call alike
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _finite(arguments)}


def _finite(value: object) -> object:
    """Replace infinities, which JSON numbers such as 1e999 become, by the largest number."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return math.copysign(sys.float_info.max, value) if isinstance(value, float) and math.isinf(value) else value
