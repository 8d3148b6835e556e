"""Turn text into token ids and back, by the tokenizers library.

In: transformers' fast tokenizer, as loading/tokenizer_files.py reads it. Out: a Tokenizer. Importing this module is fast.
"""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import nanoinfer
from nanoinfer.errors import InvalidPromptError, first_line, shown

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

# A text with at least this many characters is encoded as a batch of one text, which does not hold Python's lock. `encode` holds
# it for 25 ms per 100,000 characters. Batches use threads, so tokenizers warns if the process forks later.
LONG_TEXT = 2**14

# The characters that byte-level tokenizers (GPT-2's, Qwen's) write for bytes: visible ones for themselves, others from 256 on.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE}
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))}
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}
# How Llama's tokenizer writes the bytes of a character that is not in its vocabulary.
_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


@contextmanager
def panics_raised() -> Iterator[None]:
    """Raise a panic of the tokenizers library, such as a regex that explodes, as a RuntimeError. A panic is a BaseException."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(str(error)) from error
        raise


def _keep_first_space(backend: "tokenizers.Tokenizer") -> None:
    """Change a decoder that removes the first space of a text, as Llama's does, because its tokenizer inserts one there."""
    if backend.decoder is None:
        return
    settings = json.loads(backend.decoder.__getstate__())
    steps = settings.get("decoders", [settings])
    for index, step in enumerate(steps):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif step["type"] == "Strip" and step["content"] == " " and {"type": "Fuse"} in steps[:index]:  # of the whole text
            step["start"] = 0
    decoder = backend.decoder
    decoder.__setstate__(json.dumps(settings).encode())
    backend.decoder = decoder


def _keep_own_texts(backend: "tokenizers.Tokenizer") -> dict[str, str]:
    """Let a byte-level decoder write added tokens such as "caf\u00e9" as they are, whose characters it takes for bytes.

    Returns each of them with the byte-level spelling of its text. A token that the model writes for bytes, such as that of a
    single byte, is none of them.
    """
    from tokenizers import Regex, decoders

    if (decoder := backend.decoder) is None or b'"ByteLevel"' not in decoder.__getstate__():
        return {}
    added = {backend.id_to_token(i) or "": token.content for i, token in backend.get_added_tokens_decoder().items()}
    spellings = {
        name: "".join(_CHARACTER_OF[byte] for byte in added[name].encode())
        for name in sorted(added, key=len, reverse=True)  # a spelling may be such a token itself, which is longer
        if not name.isascii()
        and all(character in _BYTE_OF for character in name)
        and (backend.model.token_to_id(name) is None or len(backend.model.tokenize(name)) > 1)
    }
    if spellings:
        steps = [decoders.Replace(Regex(rf"\A{re.escape(name)}\z"), spelling) for name, spelling in spellings.items()]
        backend.decoder = decoders.Sequence([*steps, decoder])
    return {added[name]: spelling for name, spelling in spellings.items()}


class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        hf: the tokenizer of transformers.
        own_texts: the text of an added token whose characters a byte-level decoder takes for bytes -> its byte-level spelling.
        backend: a copy of the tokenizers library's object inside hf. Truncation and padding are its state, so without a copy a
            user's call of `hf` with truncation=True would truncate later prompts. The copy keeps the space of a first token: an
            answer continues a prompt, so the space is a part of its text.
    """

    def __init__(self, hf: "PreTrainedTokenizerFast") -> None:
        self.hf = hf
        self.backend: tokenizers.Tokenizer = copy.deepcopy(hf.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = hf.backend_tokenizer.encode_special_tokens
        _keep_first_space(self.backend)
        self.own_texts = _keep_own_texts(self.backend)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer | None":
        """Return the tokenizer in a folder (loading/tokenizer_files.py), or None without tokenizer files."""
        hf = nanoinfer.read_tokenizer(path)
        return None if hf is None else cls(hf)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text. add_special_tokens: whether to add the tokenizer's special tokens, such as BOS.

        max_tokens: the most ids that can be used. If a text has more than twice as many, the returned ids may be those of
        its beginning, since encoding takes 400 bytes a token. They are still more than twice as many. None: no limit.

        Raises: InvalidPromptError if the text has a lone surrogate, which is not valid Unicode.
        """
        if max_tokens is not None:
            ids: list[int] = []
            size = max(LONG_TEXT, 2 * max_tokens)
            for start in range(0, len(text), size) if len(text) > 4 * size else ():  # a cut adds few tokens
                ids += self.encode(text[start : start + size], add_special_tokens=False)
                if len(ids) > 2 * max_tokens:
                    return ids
        try:
            with panics_raised():
                if len(text) > LONG_TEXT:
                    return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except RuntimeError as error:
            raise InvalidPromptError(f"the tokenizer fails on the text {shown(text)}: {first_line(error)}") from error
        except TypeError as error:
            # What Python reads by another encoding has its bytes as U+DC80 to U+DCFF.
            is_of_locale = any("\udc80" <= character <= "\udcff" for character in text)
            hint = ", or set PYTHONUTF8=1 where the locale has another encoding" if is_of_locale else ""
            raise InvalidPromptError(
                f"the text is not valid Unicode, got {shown(text)}; decode its bytes with utf-8{hint}"
            ) from error

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of some ids. Ids beyond the vocabulary decode to "", an incomplete character to U+FFFD."""
        if len(token_ids) > LONG_TEXT:  # without Python's lock, as in encode
            return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single id, which may be a special token."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a single id, also those of a part of a character, which token_text shows as U+FFFD."""
        text = self.token_text(token_id)
        token = self.backend.id_to_token(token_id) or ""
        if "\ufffd" in text:
            if fallback := _BYTE_FALLBACK.fullmatch(token):
                return bytes.fromhex(fallback[1])
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
        return text.encode()

    def get_chat_template(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """Return the Jinja template for a conversation, or "". Some checkpoints have another template for tools."""
        try:
            return str(self.hf.get_chat_template(chat_template, tools=[{}] if has_tools else None))
        except ValueError:
            return ""
