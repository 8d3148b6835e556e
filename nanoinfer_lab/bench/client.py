"""A client of any OpenAI-compatible server (nanoinfer, vLLM, llama.cpp, ollama, OpenAI), for `bench serve`.

In: a URL and JSON bodies. Out: JSON, the bytes of a request, and the chunks of a received stream. It requires only the standard
library.
"""

import json
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from nanoinfer.errors import InvalidValueError, NanoinferError

CONNECT_SECONDS = 10
MAX_ERROR_BYTES, MAX_ERROR_CHARACTERS = 2**16, 300


class Client:
    """Sends requests to a server, each on its own connection.

    Every method raises NanoinferError if the server cannot be reached, refuses the request, or closes the connection early.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float | None = None) -> None:
        """Check the URL without sending anything.

        Args:
            url: http://host:port, to which /v1 is added, or a URL with a path such as https://host/api/v1.
            api_key: the key that every request sends. None: no key.
            timeout: the most seconds that may pass without a byte of the answer. None: no limit.
        """
        try:
            split = urlsplit(url)
            self.host, self.port = split.hostname or "", split.port or (443 if split.scheme == "https" else 80)
        except ValueError:  # the port is not a number
            split, self.host = urlsplit(""), ""
        if split.scheme not in ("http", "https") or not self.host or not url.isascii() or not url.isprintable():
            raise InvalidValueError(f"the URL must be such as http://127.0.0.1:8000 or https://host/v1, got {url!r}")
        self._is_secure = split.scheme == "https"
        self._base = split.path.rstrip("/") or "/v1"
        self.url = f"{split.scheme}://{split.netloc.rpartition('@')[2]}{self._base}"
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise InvalidValueError("the API key has characters that a header cannot have; check it for line breaks")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Return the name of the server's first model, which is often the only one."""
        with self._send("/models", self._request("GET", "/models")) as response:
            listed = _parse(response.read()).get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
            raise NanoinferError(f"{self.url}/models lists no model; name one with --model")
        return str(listed[0].get("id"))

    def metrics(self) -> str:
        """Return the text of /metrics, which is not below the URL's /v1."""
        with self._send("/metrics", self._request("GET", "/metrics", base=self._base.removesuffix("/v1"))) as response:
            return response.read().decode(errors="replace")

    def stream_request(self, path: str, body: dict[str, object]) -> bytes:
        """Return the bytes of a request that asks for a stream, for a caller with its own connection."""
        return self._request("POST", path, json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}))

    def parse_stream(self, path: str, received: Any) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream, from `received`, whose makefile("rb") returns a file with the answer."""
        with self._response(path, received) as response:
            rest = b""
            while data := response.read1(2**16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = line.removeprefix(b"data:").strip()
                    if event == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        chunk = _parse(event)
                        if chunk.get("error"):
                            raise NanoinferError(f"{self.url} failed: {_error_message(event)}")
                        if not _is_chunk(chunk):
                            raise NanoinferError(f"the server sent {_shorten(event)!r}, which is not a chunk of OpenAI's API")
                        yield chunk
        raise NanoinferError(f"the stream of {self.url} ended before its last event; the server may have been stopped")

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The settings of TLS. None: the URL is not https."""
        return ssl.create_default_context() if self._is_secure else None

    def _new_connection(self) -> HTTPConnection:
        if self.tls is not None:
            return HTTPSConnection(self.host, self.port, timeout=CONNECT_SECONDS, context=self.tls)
        return HTTPConnection(self.host, self.port, timeout=CONNECT_SECONDS)

    def no_connection(self, error: OSError) -> NanoinferError:
        """Return the error for a server that cannot be reached."""
        hint = "start one with `nanoinfer serve`, or correct the URL"
        return NanoinferError(f"no server answers at {self.url} ({str(error) or type(error).__name__}); {hint}")

    def _request(self, method: str, path: str, body: str | None = None, *, base: str | None = None) -> bytes:
        """Return the bytes of a request, after whose answer the server closes the connection.

        base: what precedes the path. None: the URL's.
        """
        connection, sent = self._new_connection(), bytearray()
        connection.sock = SimpleNamespace(sendall=sent.extend)
        connection.request(method, (self._base if base is None else base) + path, body, self._headers | {"Connection": "close"})
        return bytes(sent)

    @contextmanager
    def _send(self, path: str, request: bytes) -> Iterator[HTTPResponse]:
        """Send a request on a new connection, and yield its response if the status is 200."""
        with closing(self._new_connection()) as connection:
            try:
                connection.connect()
            except OSError as error:
                raise self.no_connection(error) from error
            connection.sock.settimeout(self.timeout)
            with self._response(path, connection.sock, request) as response:
                yield response

    @contextmanager
    def _response(self, path: str, received: Any, request: bytes = b"") -> Iterator[HTTPResponse]:
        """Yield the response if its status is 200, after sending the request if there is any."""
        try:
            if request:
                received.sendall(request)
            with HTTPResponse(received) as response:
                response.begin()
                if response.status != 200:
                    message = _error_message(response.read(MAX_ERROR_BYTES))
                    hint = "; give --api-key, or set OPENAI_API_KEY" if response.status == 401 else ""
                    raise NanoinferError(f"{self.url}{path} answered {response.status}: {message}{hint}")
                yield response
        except TimeoutError as error:
            raise NanoinferError(f"{self.url} sent nothing for too long ({error})") from error
        except (OSError, HTTPException) as error:
            raise NanoinferError(f"the connection to {self.url} broke ({str(error) or type(error).__name__})") from error


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise NanoinferError(f"the server sent {_shorten(text)!r} where a JSON object was expected; is it OpenAI-compatible?")
    return value


def _is_chunk(value: dict[str, object]) -> bool:
    choices = value.get("choices") or []
    return (
        isinstance(value.get("usage") or {}, dict)
        and isinstance(choices, list)
        and all(isinstance(choice, dict) and isinstance(choice.get("delta") or {}, dict) for choice in choices)
    )


def _error_message(body: bytes) -> str:
    """Return the message in an error body of OpenAI, ollama or FastAPI, or any other text.

    >>> _error_message(b'{"error": {"message": "no such model"}}'), _error_message(b'{"error": "no such model"}')
    ('no such model', 'no such model')
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return _shorten(body) or "(no text)"
    for name in ("error", "message", "detail"):
        value = value.get(name, value) if isinstance(value, dict) else value
    return _shorten(str(value).encode())


def _shorten(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:MAX_ERROR_CHARACTERS]
