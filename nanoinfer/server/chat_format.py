"""The tools of a chat request, and the parsing of its answers.

In: requests, and the model's chat template. Out: prompts and SamplingParams with the tools, and a ChatParser for each answer.
"""

from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.chat.messages import constrain_calls
from nanoinfer.chat.parsing import ChatParser, calls_as_hermes, thinks_as_qwen3
from nanoinfer.chat.tools import after_thinking
from nanoinfer.engine.inputs import InputProcessor, PreparedRequest
from nanoinfer.errors import InvalidValueError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.errors import RequestError
from nanoinfer.server.protocol import ChatCompletionRequest, ChatMessage


@dataclass(frozen=True)
class ChatFormat:
    """Which fields are parsed from the answers of a model. The rest of the text is content."""

    reasoning: bool
    tool_calls: bool

    @classmethod
    def choose(cls, template: str, reasoning_parser: str | None, tool_call_parser: str | None) -> "ChatFormat":
        """Choose by vLLM's names of parsers, or by the format that the chat template writes where the name is None."""
        for option, name, known in (
            ("--reasoning-parser", reasoning_parser, "qwen3"),
            ("--tool-call-parser", tool_call_parser, "hermes"),
        ):
            if name not in (None, "none", known):
                raise InvalidValueError(f"{option} must be {known} or none, got {name!r}; without it, the template decides")
        return cls(
            reasoning=thinks_as_qwen3(template) if reasoning_parser is None else reasoning_parser != "none",
            tool_calls=calls_as_hermes(template) if tool_call_parser is None else tool_call_parser != "none",
        )

    def make_parser(self, request: ChatCompletionRequest, prompt: str) -> ChatParser:
        """Make the parser for one answer to this rendered prompt."""
        return ChatParser(
            prompt,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls and bool(_offered_tools(request)),
            parallel_tool_calls=request.parallel_tool_calls is not False,
        )

    def prepare(self, request: ChatCompletionRequest, inputs: InputProcessor, params: SamplingParams) -> PreparedRequest:
        """Render and check the conversation, and constrain the answer by a grammar where calls are required or strict."""
        tools = _offered_tools(request)
        if tools and not self.tool_calls:
            raise RequestError(
                400,
                "tools are not supported: this model's chat template has no known format of calls",
                param="tools",
                code="unsupported",
            )
        prompt = inputs.render_chat(
            messages_of(request.messages),
            add_generation_prompt=request.add_generation_prompt is not False,
            chat_template_kwargs=request.chat_template_kwargs,
            tools=tools,
        )
        if self.reasoning and params.structured_outputs is not None:
            params = replace(params, structured_outputs=after_thinking(params.structured_outputs, prompt["prompt"] or ""))
        params = constrain_calls(
            params,
            prompt["prompt"] or "",
            tools,
            "auto" if request.tool_choice is None else request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls is not False,
        )
        return inputs.prepare_prompt(prompt, params)


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_unset=True) for message in messages]


def _offered_tools(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Return the tools that the model may call."""
    return [] if request.tool_choice == "none" else request.tools or []
