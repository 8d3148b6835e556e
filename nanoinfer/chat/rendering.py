"""Render conversations as prompts, and constrain their answers to tool calls and structured outputs.

In: an engine's InputProcessor, conversations, SamplingParams. Out: ChatPrompts, and new SamplingParams.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.chat.harmony import FINAL, begun_message
from nanoinfer.chat.messages import constrain_calls
from nanoinfer.chat.parsing import END_THINK, THINK, opens_thinking
from nanoinfer.chat.tools import Tool, ToolChoice, after_thinking, requires_call, tool_schemas
from nanoinfer.engine.inputs import InputProcessor, check_params, one_per_prompt, with_prompt_index
from nanoinfer.engine.prompts import ChatPrompt
from nanoinfer.features.reasoning.thinking import limit_thinking
from nanoinfer.sampling_params import SamplingParams


def render_chats(
    inputs: InputProcessor,
    messages: Any,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice = "auto",
    **rendering: Any,
) -> tuple[list[ChatPrompt], list[SamplingParams]]:
    """Render one conversation or a list of them, and constrain the parameters of each to the tool calls that are required.

    A structured output follows the reasoning that the prompt has begun, or that a thinking_token_budget allows. For gpt-oss
    the prompt begins the final message. A grammar of the user's own constrains the whole answer.

    Raises: the errors of render_chat and constrain_calls, with the conversation's index.
    """
    is_batch = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
    chats = messages if is_batch else [messages]
    schemas, must_call = tool_schemas(tools or []), requires_call(tool_choice)
    prompts, constrained = [], []
    for index, (chat, given) in enumerate(zip(chats, one_per_prompt(params, len(chats)), strict=True)):
        with with_prompt_index(index):
            check_params(given)
            arguments = {"tools": None if tool_choice == "none" else schemas, **rendering}
            prompt = inputs.render_chat(chat, **arguments)
            form = given.structured_outputs
            if must_call or (form is not None and form.grammar is not None):
                form = None
            if form is not None and (begun := begun_message(prompt["prompt"] or "")) and not begun[1]:
                prompt = inputs.render_chat(chat, **arguments, answer_begin=FINAL)
            prompts.append(prompt)
            text = prompt["prompt"] or ""
            assert inputs.tokenizer is not None, "it has rendered the prompt"
            template = inputs.tokenizer.get_chat_template(rendering.get("chat_template"), has_tools=bool(schemas))
            has_begun = opens_thinking(text)
            thinks = has_begun or THINK in template or END_THINK in template
            limited = limit_thinking(inputs, given, prompt) if thinks and (must_call or (has_begun and form)) else given
            if form is not None and (has_begun or (thinks and limited.thinking_token_budget is not None)):
                limited = replace(limited, structured_outputs=after_thinking(form, text))
            constrained.append(constrain_calls(limited, text, schemas, tool_choice, inputs.tokenizer, thinks=thinks))
    return prompts, constrained
