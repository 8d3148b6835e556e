"""The messages of a chat, those of them that the model reads, and the file that keeps them.

In: questions and answers. Out: prompts that leave room for an answer in the model's context.
"""

import json
from pathlib import Path
from typing import Any

from nanoinfer.cli.chat_model import ChatModel
from nanoinfer.errors import InvalidValueError, NanoinferError


class Conversation:
    """A system message and the turns after it.

    Each prompt begins with the previous prompt and answer, so the prefix cache holds all but the new tokens, except when turns
    are left out, and with templates such as Qwen3's, which remove the thinking from earlier answers.

    Attributes:
        system: The system message, or None.
        messages: All questions and answers, as LLM.chat takes them.
        num_dropped: The number of oldest messages that the model no longer reads.
    """

    def __init__(self, model: ChatModel, system: str | None = None) -> None:
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.num_dropped = 0

    def render(self, question: str) -> tuple[Any, int]:
        """Return the prompt for a question, and the number of oldest messages that it leaves out.

        If less than a quarter of the context remains for the answer, the oldest turns are left out until the prompt takes at
        most half, because leaving out one turn at a time would change the beginning of every prompt, of which nothing would be
        in the prefix cache. Only add() changes the conversation itself.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt, start = self._render(messages[self.num_dropped :]), self.num_dropped
        max_model_len = self.model.max_model_len
        if max_model_len is not None and len(prompt["prompt_token_ids"]) > max_model_len * 3 // 4:
            questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
            for start in (index for index in questions if index > self.num_dropped):
                prompt = self._render(messages[start:])
                if len(prompt["prompt_token_ids"]) <= max_model_len // 2:
                    break
        return prompt, start

    def add(self, question: str, answer: str, num_dropped: int) -> None:
        """Append a turn, with the num_dropped that render() returned for its prompt."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self.num_dropped = num_dropped

    def clear(self) -> None:
        """Begin a new conversation with the same system message."""
        self.messages, self.num_dropped = [], 0

    def save(self, path: Path) -> None:
        """Write all messages as a JSON list, which LLM.chat takes. Raises: NanoinferError, if the file cannot be written."""
        text = json.dumps(self._with_system(self.messages), ensure_ascii=False, indent=1)
        try:
            path.write_bytes(text.encode())
        except OSError as error:
            raise NanoinferError(f"cannot write {path} ({error.strerror}); give another path") from error

    def load(self, path: Path) -> None:
        """Replace the messages and the system message by those of a file.

        Raises:
            InvalidValueError: If the file is not a conversation. The conversation is then unchanged.
        """
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValueError(f"cannot read {path} ({error.strerror}); give a file that /save wrote") from error
        except (ValueError, RecursionError) as error:
            raise InvalidValueError(f"{path} is not JSON ({error}); give a file that /save wrote") from error
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            example = '[{"role": "user", "content": "Hello"}, ...]'
            raise InvalidValueError(f"{path} must be a list such as {example}; give a file that /save wrote")
        is_system = [message["role"] == "system" for message in messages]
        if any(is_system[1:]):
            raise InvalidValueError(f"{path} has a system message at {is_system.index(True, 1)}; only the first can be one")
        self.system = messages[0]["content"] if any(is_system) else None
        self.messages, self.num_dropped = messages[any(is_system) :], 0

    def _render(self, messages: list[dict[str, str]]) -> Any:
        return self.model.render(self._with_system(messages))

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return messages if self.system is None else [{"role": "system", "content": self.system}, *messages]


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )
