"""Ids -> text as it grows, never half a character.

In: one token id at a time. Out: the text that is certain after it. A character of several bytes may be spread over several
tokens (an emoji is 4 bytes, often 2 to 4 tokens); nothing of it is given out before its last byte.
"""

from tokenizers.decoders import DecodeStream

from nanoinfer.tokenization.tokenizer import Tokenizer


class Detokenizer:
    """One sequence's ids as text, on the tokenizers library's DecodeStream.

    All that push and finish return, joined, is tokenizer.decode of all the ids (of a byte-level tokenizer, as GPT-2's and
    Qwen's are; others may rewrite bytes that they have shown, and what was shown stays).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []  # ids whose text has not been given out

    @property
    def num_held_ids(self) -> int:
        """How many ids wait for the rest of their character."""
        return len(self._held)

    def push(self, token_id: int) -> str:
        """The text that this id makes certain: "" while a character is incomplete."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # "Invalid prefix": an id changed the text before it. Start afresh behind what was given out.
            # This ends: a fresh stream cannot raise before it has given text out, and then fewer ids are held.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            held, self._held = self._held, []
            return "".join(self.push(held_id) for held_id in held)
        if not text:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """The text still held when no id follows: a character cut short becomes U+FFFD, as in tokenizer.decode."""
        text = self._tokenizer.decode(self._held, skip_special_tokens=self._skip_special_tokens)
        self._held.clear()
        return text
