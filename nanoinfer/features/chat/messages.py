"""Turn chat messages into a prompt as text and token ids, and required tool calls into a grammar in SamplingParams."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.engine.inputs import InputProcessor, check_params, one_per_prompt, with_prompt_index
from nanoinfer.engine.prompts import ChatPrompt, TokensPrompt
from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError, UnsupportedError, check_flag, shown
from nanoinfer.features.chat.harmony import FINAL, MARKS, begun_message
from nanoinfer.features.chat.parsing import END_THINK, THINK, opens_thinking
from nanoinfer.features.chat.template import apply_chat_template
from nanoinfer.features.chat.tools import (
    Tool,
    ToolChoice,
    after_thinking,
    requires_call,
    tool_call_grammar,
    tool_schemas,
    with_tool_arguments,
)
from nanoinfer.features.structured.params import StructuredOutputsParams
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.tokenization.tokenizer import Tokenizer

Message = Mapping[str, object]  # {"role": "user", "content": "Hello"}. The chat template decides which keys it reads.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's. A chat template may name further roles


def render_chat(
    inputs: InputProcessor,
    messages: object,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, object] | None = None,
    tools: Sequence[Tool] | None = None,
    max_tokens: int | None = None,
    answer_begin: str = "",
) -> ChatPrompt:
    """Render one conversation as a prompt. It ends with answer_begin, the beginning of the answer.

    The tokenizer's EOS ends the answer, besides the model's EOS ids, if the template writes it.
    The other arguments are those of LLM.chat, and max_tokens as in Tokenizer.encode. None: the model's length.
    """
    tokenizer = inputs.tokenizer
    conversation = [with_tool_arguments(message) for message in with_text_content(messages)]
    if tokenizer is None:
        raise InvalidPromptError("no tokenizer is loaded, so there is no chat template; use token ids")
    if not isinstance(chat_template, str | None):
        raise InvalidTypeError(f"chat_template must be a Jinja template as a string, got {shown(chat_template)}")
    check_flag("add_generation_prompt", add_generation_prompt)
    check_flag("continue_final_message", continue_final_message)
    if add_generation_prompt and continue_final_message:
        raise InvalidValueError("continue_final_message needs add_generation_prompt=False, since the answer has begun")
    if not isinstance(chat_template_kwargs, dict | None):
        raise InvalidTypeError(f"chat_template_kwargs must be a dict, got {shown(chat_template_kwargs)}")
    own = {"self", "messages", "conversation", "chat_template", "tokenize", "tools"}
    own |= {"add_generation_prompt", "continue_final_message"}
    if clash := own & (chat_template_kwargs or {}).keys():
        raise InvalidValueError(f"chat_template_kwargs must not hold {', '.join(clash)}: that is an argument of its own")
    template = tokenizer.get_chat_template(chat_template, has_tools=bool(tools))
    for index, message in enumerate(conversation):
        if (role := message.get("role", "user")) not in ROLES and f"'{role}'" not in template.replace('"', "'"):
            raise InvalidValueError(
                f"messages[{index}]: the role must be one of {', '.join(ROLES)}, or another that the chat template names, "
                f"got {shown(role)}"
            )
    if tools and template and not re.search(r"\btools\b", template):
        raise UnsupportedError("this chat template has no place for tools; use a model or a chat template that has")
    text = apply_chat_template(
        tokenizer,
        conversation,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tool_schemas(tools) if tools else None,
        **(chat_template_kwargs or {}),
    )
    text += answer_begin
    # The template has written all special tokens, so `encode` must not add them a second time.
    ids = tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens or inputs.max_model_len)
    prompt: ChatPrompt = {"prompt": text, "prompt_token_ids": ids}
    end = tokenizer.hf.eos_token
    end_id = None if end is None else tokenizer.backend.token_to_id(end)
    if end_id is not None and (end in text or "eos_token" in template):  # perhaps only after the answer
        prompt["eos_token_ids"] = [end_id]
    return prompt


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
            prompt = render_chat(inputs, chat, **arguments)
            form = given.structured_outputs
            if must_call or (form is not None and form.grammar is not None):
                form = None
            if form is not None and (begun := begun_message(prompt["prompt"] or "")) and not begun[1]:
                prompt = render_chat(inputs, chat, **arguments, answer_begin=FINAL)
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


def end_of_reasoning(tokenizer: Tokenizer | None, vocab_size: int) -> int | None:
    """Return the token that ends reasoning, which thinking_token_budget needs. None: the model has none."""
    token_id = None if tokenizer is None else tokenizer.backend.token_to_id(END_THINK)
    return token_id if token_id is not None and token_id < vocab_size else None


def limit_thinking(inputs: InputProcessor, params: SamplingParams, prompt: TokensPrompt, share: float = 0.25) -> SamplingParams:
    """Leave room for a required call or format: limit the reasoning, if it has no budget and can be held to one, to a share."""
    if params.thinking_token_budget is not None or end_of_reasoning(inputs.tokenizer, inputs.vocab_size) is None:
        return params
    num_tokens = params.max_tokens or inputs.max_model_len - len(prompt["prompt_token_ids"])
    return replace(params, thinking_token_budget=int(max(num_tokens, 0) * share))


def with_text_content(messages: Any) -> list[dict[str, object]]:
    """Return the messages with strings as contents: text parts are joined by newlines, as in vLLM, and None becomes "".

    >>> with_text_content([{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}])
    [{'role': 'user', 'content': 'Hello\\nthere'}]
    """
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidTypeError(
            f'messages must be a list of dicts like {{"role": "user", "content": "Hello"}}, got {shown(messages)}'
        )
    return [
        {key: _text(value, index) if key == "content" else value for key, value in message.items()}
        for index, message in enumerate(messages)
    ]


def constrain_calls(
    params: SamplingParams,
    prompt: str,
    tools: Sequence[Mapping[str, object]],
    tool_choice: ToolChoice,
    tokenizer: Tokenizer | None,
    *,
    thinks: bool,
    parallel_tool_calls: bool = True,
    is_harmony: bool | None = None,
) -> SamplingParams:
    """Return params with the grammar of required or strict calls.

    A required call replaces a structured output, because the answer has no other content.

    The other arguments are those of tool_call_grammar. is_harmony: whether the model is gpt-oss. None: the prompt shows it.
    """
    begun = begun_message(prompt)
    harmony_ids = None
    if tokenizer is not None and (begun is not None if is_harmony is None else is_harmony):
        added = tokenizer.hf.get_added_vocab()
        harmony_ids = {mark: added.get(mark, -1) for mark in MARKS}
    grammar = tool_call_grammar(
        tools, tool_choice, prompt=prompt, thinks=thinks, parallel_tool_calls=parallel_tool_calls, harmony_ids=harmony_ids
    )
    if grammar is None:
        return params
    if harmony_ids is not None and (begun is None or begun[0] != "assistant" or -1 in harmony_ids.values()):
        raise UnsupportedError(
            "required and strict tool calls in gpt-oss's format need its tokenizer, and a prompt that ends with "
            "<|start|>assistant; use add_generation_prompt=True, or tool_choice 'auto' without strict tools"
        )
    if params.structured_outputs is not None and not requires_call(tool_choice):
        raise InvalidValueError("structured_outputs cannot be used with strict tool calls; use one of them")
    return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


def _text(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple | None):
        raise InvalidTypeError(
            f"messages[{index}]: content must be a string, a list of text parts or None, got {shown(content)}"
        )
    texts: list[str] = []
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise UnsupportedError(f"messages[{index}]: a part of type {kind!r} is not supported; give text parts only")
        text = part.get(kind) if isinstance(kind, str) else None  # or {"type": "refusal", "refusal": ...}
        if not isinstance(text, str):
            example = '{"type": "text", "text": "..."}'
            raise InvalidTypeError(f"messages[{index}]: a part of content must be {example}, got {shown(part)}")
        texts.append(text)
    return "\n".join(texts)
