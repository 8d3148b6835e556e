"""Log-probabilities in OpenAI's two shapes, the chat's and the older one of completions.

In: LogprobsOnePosition for each token. Out: plain dicts. A token that is part of a character has true bytes in both: as "bytes"
in the chat's shape, and as the text "bytes:\\xf0\\x9f" in the older one.
"""

import codecs
import functools
from collections.abc import Sequence
from typing import Any

from nanoinfer.outputs import LogprobsOnePosition
from nanoinfer.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0  # instead of -inf, which JSON does not have. vLLM's value


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition], num_top: int
) -> dict[str, Any]:
    """The "logprobs" of a chat's choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = _bytes(tokenizer, token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = sorted(position.items(), key=lambda item: -item[1].logprob)[:num_top]
        top_entries = [entry(other, one.logprob) for other, one in top]
        content.append(entry(token_id, position[token_id].logprob) | {"top_logprobs": top_entries})
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """The "logprobs" of a completion's choice, over the pieces of a stream. It keeps the offset in the text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def push(self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None]) -> dict[str, list[Any]]:
        """The next tokens' part. The first token of a prompt has no log-probability."""
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            part["tokens"].append(self._text(token_id))
            part["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(_bytes(self._tokenizer, token_id)))
            part["token_logprobs"].append(None if position is None else max(position[token_id].logprob, LOWEST))
            part["top_logprobs"].append(None if position is None else self._top(position))
        return part

    def _top(self, position: LogprobsOnePosition) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, one in position.items():
            top.setdefault(self._text(token_id), max(one.logprob, LOWEST))  # of two ids with one text, the likelier
        return top

    def _text(self, token_id: int) -> str:
        data = _bytes(self._tokenizer, token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@functools.lru_cache(maxsize=2**18)  # decoding takes 5 us, and a token may be in the top of every position
def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return str(token_id).encode() if tokenizer is None else tokenizer.token_bytes(token_id)
