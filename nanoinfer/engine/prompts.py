"""Prompts in the forms people have them -> text and token ids.

In: strings, lists of token ids, vLLM's dicts, or a list of these. Out: Prompts. What is malformed is refused with its index.
"""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from nanoinfer.errors import InvalidPromptError, InvalidTypeError, NanoinferError
from nanoinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """text is None where only token ids were given."""

    text: str | None
    token_ids: list[int]


def as_list(prompts: Any) -> list[Any]:
    """One prompt, or a list of them, as a list of them. A list of plain ints is one prompt.

    >>> as_list("Hello"), as_list([5, 6]), as_list(["Hello", [5, 6]])
    (['Hello'], [[5, 6]], ['Hello', [5, 6]])
    """
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidTypeError(f"prompts must be a string, token ids, a dict or a list of these, got {reprlib.repr(prompts)}")
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None) -> Prompt:
    """One prompt in any of its forms. A dict may hold both text and ids: then the ids are used, the text is only shown.

    Raises: InvalidPromptError, InvalidTypeError.
    """
    if isinstance(prompt, dict):
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        if unknown or not isinstance(text, str | None) or (text is None and token_ids is None):
            raise InvalidPromptError(
                f"a prompt's dict holds prompt (a string) or prompt_token_ids (ids), got {reprlib.repr(prompt)}"
            )
        return Prompt(text, _token_ids(token_ids)) if token_ids is not None else parse_prompt(text, tokenizer)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidPromptError("this checkpoint has no tokenizer; give token ids, or LLM(tokenizer=...)")
        return Prompt(prompt, tokenizer.encode(prompt))
    return Prompt(None, _token_ids(prompt))


@contextmanager
def with_prompt_index(index: int) -> Iterator[None]:
    """Put the prompt's index before whatever is refused inside."""
    try:
        yield
    except NanoinferError as error:
        raise type(error)(f"prompt {index}: {error}") from error


def _token_ids(ids: Any) -> list[int]:
    """A list of its own, of plain ints: numpy's integers are taken, too."""
    if isinstance(ids, list | tuple):
        if all(type(i) is int for i in ids):
            return list(ids)
        if all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
            return [int(i) for i in ids]
    raise InvalidTypeError(
        f"a prompt must be a string, a list of token ids (of an array, its .tolist()), or a dict with prompt or "
        f"prompt_token_ids, got {reprlib.repr(ids)}"
    )
