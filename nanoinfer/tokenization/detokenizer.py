"""Turn token ids into text, released incrementally, in whole characters.

In: one token id at a time. Out: the text that no later id can change. A character of several bytes may be split over several
tokens (an emoji is 4 bytes, often 2 to 4 tokens). It is released with its last byte.
"""

from collections.abc import Iterable, Sequence

from tokenizers.decoders import DecodeStream

from nanoinfer.tokenization.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # U+FFFD, to which bytes decode that are no character


class Detokenizer:
    """The text of one sequence's ids, decoded by the tokenizers library's DecodeStream.

    The joined texts of push and finish equal tokenizer.decode of all ids, without an incomplete end, for byte-level
    tokenizers such as GPT-2's and Qwen's. Other tokenizers may change earlier text, and released text is never changed.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []  # ids whose text is not released yet

    @property
    def num_held_ids(self) -> int:
        """The number of ids whose character is incomplete."""
        return len(self._held)

    def push(self, token_id: int) -> str:
        """Add an id and return the text that it releases, or "" while a character is incomplete."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # "Invalid prefix": an id changed the text before it. Start a new stream after the released text.
            # The recursion ends: a new stream cannot raise before it has released text, and then fewer ids are held.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            held, self._held = self._held, []
            return "".join(self.push(held_id) for held_id in held)
        if text:
            self._held.clear()
        return text or ""

    def finish(self) -> str:
        """Return the text of the held ids when no id follows. An incomplete character is left out."""
        text = self._decode_complete(self._held)
        self._held.clear()
        return text

    def added_texts(self, token_ids: list[int]) -> Sequence[str | None]:
        """Return the text that each of these ids would add if it came next, for log-probabilities.

        It is the text of the id alone, except for a piece of a character, which adds to the held ids either
        nothing or the character that it completes.
        """
        before = self._decode_complete(self._held)
        texts = []
        for token_id in token_ids:
            text = self._backend.decode([token_id], skip_special_tokens=False)
            if REPLACEMENT in text:
                text = self._decode_complete([*self._held, token_id])[len(before) :]
            texts.append(text)
        return texts

    def skipped_among(self, texts: Iterable[str]) -> dict[int, str]:
        """Return {id: text} for those texts that are special tokens, which the text leaves out."""
        if not self._skip_special_tokens or not texts:
            return {}
        special = {token.content: i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        return {special[text]: text for text in texts if text in special}

    def _decode_complete(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens).rstrip(REPLACEMENT)


class NoText(Detokenizer):
    """The text of a sequence whose request wants none, or for which there is no tokenizer."""

    def __init__(self) -> None:
        self._held, self._skip_special_tokens = [], False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def added_texts(self, token_ids: list[int]) -> Sequence[str | None]:
        return [None for _ in token_ids]
