"""`nanoinfer serve --record FILE`: the arrivals and lengths of all requests, for `bench serve` and `simulate --trace`.

In: the finished streams of an AsyncLLM. Out: lines of Mooncake's form, without text or tokens. nanoinfer_lab/bench/workloads.py
reads them.
"""

import json
import secrets
from array import array
from hashlib import blake2b

from nanoinfer.errors import InvalidValueError
from nanoinfer.server.async_llm import RequestStream

BLOCK_TOKENS = 512  # Mooncake's


class RequestLog:
    """Appends a line for each answer to a file."""

    def __init__(self, path: str) -> None:
        """Raises: InvalidValueError if the file cannot be written."""
        self._path = path
        self._key = secrets.token_bytes(16)  # so that nobody can find a prompt by its hash
        try:
            self._append("")
        except OSError as error:
            raise InvalidValueError(f"record must be a file that can be written, got {path!r} ({error})") from error

    def add(self, stream: RequestStream) -> None:
        """Record a finished request. Embeddings, and answers without a token, are left out."""
        assert stream.request is not None
        if not stream.prepared.is_answered:
            return
        token_ids = stream.prepared.prompt_token_ids
        row = {"timestamp": round(stream.arrival_time * 1e3), "input_length": len(token_ids)}
        hash_ids = self._hash_ids(token_ids, stream.prepared.cache_salt)
        lengths = [seq.num_output_tokens for seq in stream.request.sequences if seq.num_output_tokens]
        self._append("".join(json.dumps(row | {"output_length": n, "hash_ids": hash_ids}) + "\n" for n in lengths))

    def _hash_ids(self, token_ids: list[int], salt: str | None) -> list[int]:
        """Return an id for each block, which stands for all tokens up to its end."""
        hashed, ids = blake2b((salt or "").encode(errors="surrogatepass"), key=self._key, digest_size=6), []
        for start in range(0, len(token_ids), BLOCK_TOKENS):
            hashed.update(array("i", token_ids[start : start + BLOCK_TOKENS]))
            ids.append(int.from_bytes(hashed.digest(), "little"))
        return ids

    def _append(self, lines: str) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(lines)
