"""/v1/responses: OpenAI's Responses API.

In: a body of that API, which becomes a chat request. Out: an answer as a response of items, whole or as events. With
--max-stored-responses, the latest responses are kept in memory, so that a request can continue a response by its id.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator
from pydantic_core import to_json

from nanoinfer.outputs import CompletionOutput, Delta
from nanoinfer.server import protocol
from nanoinfer.server.blocks import CUT, Block, BlockReply, Change, render
from nanoinfer.server.choices import ChatFormat, num_reasoning_tokens
from nanoinfer.server.errors import RequestError
from nanoinfer.tokenization.tokenizer import Tokenizer

MAX_STORED_BYTES = 2**28  # the limit of all stored conversations
_RETURNED = set(
    "instructions max_output_tokens metadata parallel_tool_calls previous_response_id reasoning text tool_choice".split()
)


class Part(protocol.Lenient):
    type: Literal["input_text", "output_text", "refusal", "reasoning_text"]
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "refusal"))]


Text = protocol.text_or(
    Annotated[Part, protocol.check_type("a part", "input_text", "output_text", "refusal", "reasoning_text")]
)


class MessageItem(protocol.Lenient):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class ReasoningItem(protocol.Lenient):
    type: Literal["reasoning"]
    content: Text | None = None


class CallItem(protocol.Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(protocol.Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: Text


Item = protocol.one_of(
    "an item", message=MessageItem, reasoning=ReasoningItem, function_call=CallItem, function_call_output=CallOutputItem
)
_ITEMS = TypeAdapter(list[Item])


class FunctionTool(protocol.Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: protocol.JsonObject | None = None
    strict: bool | None = None


class FunctionChoice(protocol.Body):
    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")] | Annotated[FunctionChoice, Tag("<function>")],
    Discriminator(lambda choice: "<mode>" if isinstance(choice, str) else "<function>"),
]


class TextFormat(protocol.Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[protocol.JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("a format has a schema if its type is json_schema")
        return self


class TextConfig(protocol.Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(protocol.Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None  # accepted without a summary, because the reasoning itself is in the answer


class ResponseStreamOptions(protocol.Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(protocol.SamplingRequest):
    """The body of /v1/responses."""

    input: protocol.text_or(Item)
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: protocol.list_of_tools(FunctionTool) | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    # The reasoning is in the answer, not encrypted.
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(fail_fast=True)] | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(protocol.few_items)] | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: Literal[0] | None = None
    chat_template_kwargs: Annotated[protocol.JsonObject, BeforeValidator(protocol.few_items)] | None = None
    prompt: None = None


def to_chat(
    body: ResponsesRequest, previous: Sequence[protocol.JsonObject] = ()
) -> tuple[protocol.ChatCompletionRequest, list[protocol.JsonObject]]:
    """Return the chat request for a body that continues the previous messages, and the messages to store.

    Raises: RequestError, 400.
    """
    messages = [*previous]
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        _add(messages, item)
    if not messages:
        raise RequestError(400, "input has no items; give a text, or at least one item", param="input")
    stored = [*messages]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    while [message["role"] for message in messages[:2]] == ["system"] * 2:  # many templates have a place for only one
        first, second, *rest = messages
        messages = [first | {"content": f"{first['content']}\n\n{second['content']}"}, *rest]
    fields: protocol.JsonObject = {"messages": messages, "max_tokens": body.max_output_tokens}
    tools = [tool for tool in body.tools or () if isinstance(tool, FunctionTool)]
    given = ("name", "description", "parameters", "strict")
    fields["tools"] = [{"type": "function", "function": tool.model_dump(include={*given}, exclude_none=True)} for tool in tools]
    fields["tool_choice"] = choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    fields |= {name: getattr(body, name) for name in ("parallel_tool_calls", "chat_template_kwargs")}
    fields["reasoning_effort"] = (body.reasoning or Reasoning()).effort
    if (answer_format := (body.text or TextConfig()).format) is not None:
        fields["response_format"] = {"type": answer_format.type, "json_schema": {"schema": answer_format.schema_}}
    return protocol.chat_request(body, fields), stored


def _add(messages: list[dict[str, Any]], item: MessageItem | ReasoningItem | CallItem | CallOutputItem) -> None:
    """Add an item to a chat, whose assistant messages have reasoning, then content, then calls."""
    if isinstance(item, CallOutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": protocol.joined(item.output)})
    elif isinstance(item, MessageItem) and item.role != "assistant":
        role = "system" if item.role == "developer" else item.role  # few templates know "developer"
        messages.append({"role": role, "content": protocol.joined(item.content)})
    else:
        last = messages[-1] if messages else {}
        is_new = last.get("role") != "assistant" or isinstance(item, ReasoningItem)
        if is_new or (isinstance(item, MessageItem) and last.keys() & {"content", "tool_calls"}):
            messages.append({"role": "assistant"})
        else:
            messages[-1] = dict(last)  # the original belongs to a stored response, too
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].get("tool_calls", [])
            messages[-1]["tool_calls"] = [*calls, {"id": item.call_id, "type": "function", "function": function}]
        elif isinstance(item, ReasoningItem):
            messages[-1]["reasoning"] = protocol.joined(item.content or "")
        else:
            messages[-1]["content"] = protocol.joined(item.content)


# ---- stored responses


@dataclass(frozen=True)
class StoredResponse:
    """json: the response as it was sent. messages: the conversation with it, without instructions. num_bytes: their size."""

    json: protocol.JsonObject
    messages: list[protocol.JsonObject]
    num_bytes: int


class ResponseStore:
    """The latest responses, up to max_responses and MAX_STORED_BYTES. Each belongs to the API key that made it."""

    def __init__(self, max_responses: int) -> None:
        self.max_responses = max_responses
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # (key, id) -> response

    def keeps(self, store: bool | None) -> bool:
        """Whether to keep the response to a request with this "store". Raises: RequestError, 400, if it cannot be kept."""
        if store and not self.max_responses:
            raise RequestError(400, "store=true needs a server with --max-stored-responses", param="store", code="unsupported")
        return self.max_responses > 0 and store is not False

    def get(self, key: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response of an API key. Raises: RequestError, 404, if it was not stored or is forgotten."""
        if (key, response_id) in self._kept:
            return self._kept[key, response_id]
        reason = f"was not stored, or is forgotten: the server keeps the latest {self.max_responses} responses in memory"
        if not self.max_responses:
            reason = "is not stored: this server keeps no responses without --max-stored-responses"
        message = f"the response {response_id[:100]!r} {reason}; send the whole conversation as input"
        raise RequestError(404, message, param=param, code="response_not_found")

    def add(self, key: str, messages: list[protocol.JsonObject], num_bytes: int, response: protocol.JsonObject) -> None:
        """Keep a response of a key after these messages, of num_bytes, and forget the oldest responses beyond the limits."""
        messages = [*messages]
        for item in _ITEMS.validate_python(response["output"]):
            _add(messages, item)
        num_bytes += len(to_json(response["output"]))
        self._kept[key, str(response["id"])] = StoredResponse(response, messages, num_bytes)
        while len(self._kept) > self.max_responses or sum(kept.num_bytes for kept in self._kept.values()) > MAX_STORED_BYTES:
            self._kept.popitem(last=False)

    def delete(self, key: str, response_id: str) -> None:
        self.get(key, response_id)
        del self._kept[key, response_id]


# ---- the reply


class ResponsesReply(BlockReply):
    """The reply of /v1/responses."""

    response_format = "text.format"

    def __init__(
        self,
        body: ResponsesRequest,
        chat: protocol.ChatCompletionRequest,
        chat_format: ChatFormat,
        model: str,
        tokenizer: Tokenizer | None,
        keep: Callable[[protocol.JsonObject], None] | None,
    ) -> None:
        """keep: stores the response when it is complete. None: the response is not stored."""
        super().__init__(chat, chat_format, model)
        self._body, self._tokenizer, self._keep = body, tokenizer, keep
        self._created_at = int(time.time())
        self._num_events = 0

    def message(self, answer: CompletionOutput | Delta) -> protocol.JsonObject:
        reason = answer.finish_reason
        status = "in_progress" if reason is None else "incomplete" if reason in CUT else "completed"
        response = self._response(status) | {
            "output": [self._item(block) for block in self.blocks.all],
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage() if self.answers.outputs else None,
        }
        if self._keep is not None and reason is not None:
            self._keep(response)
        return response

    @cached_property
    def _given(self) -> protocol.JsonObject:
        """Return the fields of the request that its response repeats."""
        given: dict[str, Any] = self._body.model_dump(include=_RETURNED, by_alias=True, exclude_none=True)
        tools = [tool.model_dump() for tool in self._body.tools or () if isinstance(tool, FunctionTool)]
        return given | {"tools": tools, "text": {"format": {"type": "text"}} | given.get("text", {})}

    def _response(self, status: str) -> protocol.JsonObject:
        params = self.answers.streams[0].prepared.params
        return {
            "id": f"resp_{self.answers.id}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "store": self._keep is not None,
            "temperature": params.temperature,
            "tool_choice": "auto",
            "top_p": params.top_p,
            "usage": None,
            **self._given,
        }

    def delta_events(self, delta: Delta) -> Iterator[protocol.JsonObject]:
        if not self.has_begun:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress"))
        for change, block, new in self.blocks.push(delta.text, delta.finish_reason):
            yield from self._block_events(change, block, new)
        if delta.finish_reason is not None:
            response = self.message(delta)
            yield self._event(f"response.{response['status']}", response=response)

    def _block_events(self, change: Change, block: Block, new: str) -> Iterator[protocol.JsonObject]:
        is_call, at = block.kind == "call", {"output_index": block.index}
        within = at | {"item_id": self._item_id(block)} | ({} if is_call else {"content_index": 0})
        name = {
            "reasoning": "response.reasoning_text",
            "content": "response.output_text",
            "call": "response.function_call_arguments",
        }[block.kind]
        more: protocol.JsonObject = {"logprobs": []} if block.kind == "content" else {}
        if change == "grows":
            yield self._event(f"{name}.delta", delta=new, **within, **more)
        elif change == "begins":
            yield self._event("response.output_item.added", item=self._item(block, is_open=True), **at)
            if not is_call:
                yield self._event("response.content_part.added", part=_part(block), **within)
        else:
            text = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
            yield self._event(f"{name}.done", **text, **within, **more)
            if not is_call:
                yield self._event("response.content_part.done", part=_part(block), **within)
            yield self._event("response.output_item.done", item=self._item(block), **at)

    def failure(self, error: RequestError) -> bytes:
        first = [] if self.has_begun else [self._event("response.created", response=self._response("in_progress"))]
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status_code, "server_error")
        fields = {"error": {"code": code, "message": error.detail}}
        return render([*first, self._event("response.failed", response=self._response("failed") | fields)])

    def _event(self, name: str, /, **fields: object) -> protocol.JsonObject:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1} | fields

    def _usage(self) -> protocol.JsonObject:
        usage = self.answers.usage()
        token_ids = self.answers.outputs[0].outputs[0].token_ids
        num_reasoning = num_reasoning_tokens(self.blocks.parser, token_ids, self._tokenizer)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: Block, *, is_open: bool = False) -> protocol.JsonObject:
        """Return an item of the output. is_open: whether the item has not ended yet."""
        status = "in_progress" if is_open else "incomplete" if block.is_cut else "completed"
        item: protocol.JsonObject = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            return item | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
        content: protocol.JsonObject = {"content": [] if is_open else [_part(block)]}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "encrypted_content": None} | content
        return item | {"type": "message", "role": "assistant"} | content

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "content": "msg", "call": "fc"}[block.kind]
        return f"{prefix}_{self.answers.id}_{block.index}"


def _part(block: Block) -> protocol.JsonObject:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
