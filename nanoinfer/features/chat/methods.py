"""LLM.chat and LLM.render_chat."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nanoinfer.arguments import check_argument_names
from nanoinfer.engine.prompts import TokensPrompt
from nanoinfer.features import LoadedLLM
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.features.adapters.request import LoRARequest
    from nanoinfer.features.chat.messages import Message
    from nanoinfer.features.chat.tools import Tool, ToolChoice


class ChatMethods:
    """The part of LLM that renders and answers conversations."""

    @check_argument_names("chat()")
    def chat(
        self: LoadedLLM,
        messages: "Sequence[Message] | Sequence[Sequence[Message]]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: "Sequence[Tool] | None" = None,
        tool_choice: "ToolChoice" = "auto",
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, through the checkpoint's chat template.

        use_tqdm, lora_request and priority are as in generate.

        Args:
            messages: [{"role": "user", "content": "Hello"}, ...], or a list of such lists. content may also be a list of text
                parts, [{"type": "text", "text": "Hello"}, ...], which are joined by newlines as in vLLM, or None for no text.
            sampling_params: as in generate. A structured output follows the reasoning that the template has begun, if any.
                parse_chat_answer(text, output.prompt) separates them.
            chat_template: a Jinja template. None: the checkpoint's.
            add_generation_prompt: whether the rendered text ends with the beginning of an answer.
            continue_final_message: whether the rendered text ends inside the last message, which the answer continues. Requires
                add_generation_prompt=False.
            chat_template_kwargs: variables for the template, such as {"enable_thinking": False} for Qwen3. None: no variables.
            tools: functions with type hints and a Google style docstring, or {"type": "function", "function": {"name": ...,
                "parameters": JSON schema}}. The answer is text, which nanoinfer.parse_chat_answer parses. gpt-oss's
                needs SamplingParams(skip_special_tokens=False).
            tool_choice: "auto", "none" (the tools are left out), or "required" and {"type": "function", "function": {"name":
                ...}}: the answer is a call that satisfies the schema, and no structured output. With "auto", this is so
                for each call if a tool has "strict": True. Both require nanoinfer[structured].

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: as in generate.
            UnsupportedError: the template has no place for tools.
        """
        from nanoinfer.features.chat.messages import render_chats

        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prompts, constrained = render_chats(
            self.engine.inputs,
            messages,
            params,
            tools=tools,
            tool_choice=tool_choice,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, constrained, use_tqdm, lora_request=lora_request, priority=priority)

    def render_chat(
        self: LoadedLLM,
        messages: "Sequence[Message]",
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: "Sequence[Tool] | None" = None,
    ) -> TokensPrompt:
        """Render a conversation as a prompt for generate() or stream(). The arguments are those of chat()."""
        from nanoinfer.features.chat.messages import render_chat

        return render_chat(
            self.engine.inputs,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
