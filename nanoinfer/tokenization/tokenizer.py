"""Text -> token ids and back, and chat messages -> text, by the checkpoint's own tokenizer files.

In: a checkpoint's folder. Out: a Tokenizer around transformers' fast tokenizer. transformers is imported inside `load`,
so that the bookkeeping floors stay light.
"""

import copy
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import CheckpointError, InvalidPromptError, InvalidValueError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")


class Tokenizer:
    """One checkpoint's tokenizer. `hf` is transformers' object; `backend` is a copy of the tokenizers library's inside it.

    A copy, because truncation and padding are state there: a user's call with truncation=True would shorten later prompts.
    """

    def __init__(self, hf: "PreTrainedTokenizerFast") -> None:
        self.hf = hf
        self.backend: tokenizers.Tokenizer = copy.deepcopy(hf.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def load(cls, path: Path) -> "Tokenizer | None":
        """The tokenizer in a folder, or None where there are no tokenizer files.

        Raises: CheckpointError for files that cannot be read, UnsupportedError for a tokenizer without a fast backend.
        """
        if not any((path / name).exists() for name in _TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:  # whatever a damaged file makes transformers raise
            raise CheckpointError(f"transformers cannot load the tokenizer in {path}: {error}") from error
        if not getattr(hf, "is_fast", False):
            raise UnsupportedError(
                f"the tokenizer in {path} ({type(hf).__name__}) has no tokenizer.json form, which streaming needs; "
                "convert it with transformers, and pass LLM(tokenizer=...)"
            )
        return cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the BOS that the tokenizer itself adds, if it adds one.

        Raises: InvalidPromptError for a lone surrogate, which no Unicode text has.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidPromptError(
                f"the text is not valid Unicode, got {reprlib.repr(text)}; decode its bytes with utf-8"
            ) from error

    def word_forms(self, word: str) -> list[tuple[int, ...]]:
        """The ids of a word where a text begins, and where a space stands before it: the ways to say it.

        The second counts only if it is as long and begins otherwise; else it is more than the word, or the same. (As in vLLM.)

        Raises: InvalidValueError for a word without tokens, or one that is no Unicode text.
        """
        try:
            bare, spaced = (tuple(self.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
        except InvalidPromptError as error:
            raise InvalidValueError(f"bad_words: {error}") from error
        if not bare:
            raise InvalidValueError(f"bad_words has {word!r}, for which the tokenizer has no tokens; leave it out")
        return [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids. Ids that the tokenizer lacks decode to nothing; half a character to U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one id alone, special ones too."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Chat messages as one text, ready for `encode(..., add_special_tokens=False)`: the template writes any BOS itself.

        Raises: InvalidPromptError where there is no template, or where the template refuses the messages.
        """
        if chat_template is None and self.hf.chat_template is None:
            raise InvalidPromptError(
                "this checkpoint's tokenizer has no chat template; pass chat_template=..., or use generate() on text"
            )
        from jinja2 import TemplateError  # transformers needs it for templates, too, and only then

        try:
            text = self.hf.apply_chat_template(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidPromptError(f"the chat template refused the messages: {error}") from error
        assert isinstance(text, str)
        return text
