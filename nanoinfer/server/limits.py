"""The conditions on a request before an endpoint sees it: a key, headers and a body of limited size, and strict JSON.

In: ASGI's scopes. Out: the request, passed on, or an error.
"""

import hashlib
import hmac
import re
import uuid
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoinfer.server.errors import RequestError, error_response, invalid_body
from nanoinfer.server.listen import is_allowed
from nanoinfer.server.settings import ServerSettings
from nanoinfer.system.worker_threads import LARGE

MAX_HEADER_BYTES, MAX_URL_BYTES = 2**15, 2**13
# While a body is parsed, no other thread can run: some 25 ns for a value, and 400 ns for a list, an object or a key.
MAX_VALUES, MAX_NESTED = 2**20, 2**16
CODINGS = {"gzip", "x-gzip", "deflate", "compress", "br", "zstd"}  # of a body that is compressed
_REQUEST_ID = re.compile(r"[!-~]{1,200}")  # a client's X-Request-Id that the response repeats. Others get a new one


class RequestLimits:
    """Refuses requests without a key (every POST, /v1), with a large URL, headers or body, or another server's name.

    Each response has an X-Request-Id, which is the request's if it has any.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._digests = [_digest(key.encode()) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes, max_bytes = 0, self._settings.max_body_bytes

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise RequestError(413, f"the body has more than {max_bytes} bytes")
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if scope["path"].startswith(f"{(root := self._settings.root_path)}/"):  # the proxy has not removed it
            scope["path"] = scope["path"].removeprefix(root)
        if len(scope["path"]) > 1:  # a redirect would name this server, which a proxy's clients may not reach
            scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            if len(scope.get("raw_path", b"") + scope["query_string"]) > MAX_URL_BYTES:
                scope["path"], scope["query_string"] = scope["path"][:100], b""  # for the log
                raise RequestError(414, f"the URL has more than {MAX_URL_BYTES} bytes; shorten it")
            scope.setdefault("state", {})["key"] = self._check(scope["path"], scope["method"], headers)
        except RequestError as error:
            refused = error_response(error.status_code, error.detail, code=error.code, path=scope["path"])
            await refused(scope, receive, send_with_id)
        else:
            if scope["method"] == "HEAD":  # answered like GET. By the method in its own scope uvicorn leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, receive_limited, send_with_id)

    def _check(self, path: str, method: str, headers: Headers) -> str:
        """Return the digest of the request's key, or "" if none is needed. Raises: RequestError for a refused request."""
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise RequestError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
        host = headers.get("host", "")  # HTTP/1.0 may lack it. Browsers, whose pages may attack, always send it
        if host and self._settings.allowed_hosts is not None and not is_allowed(host, self._settings.allowed_hosts):
            name = host[:100]
            raise RequestError(403, f"{name!r} is not a name of this server; serve with --allowed-hosts {name.split(':')[0]}")
        if self._digests and (method == "POST" or (path.startswith("/v1") and method != "OPTIONS")):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                key = headers.get("x-api-key", "")  # as Anthropic's clients send it
            given = _digest(key.strip().encode())
            is_known = [hmac.compare_digest(given, digest) for digest in self._digests]  # all keys, for a constant time
            if not any(is_known):
                raise RequestError(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
            return given.hex()
        return ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of equal length, because compare_digest's time depends on the lengths


class StrictRequest(Request):
    """A request whose JSON has neither NaN nor infinity, at most 200 levels, and not too many values to read."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel] | None) -> None:
        """model: what json() returns. None: the endpoint has no body."""
        super().__init__(scope, receive)
        self._model = model

    async def body(self) -> bytes:
        """Return the body, or a space if it is empty, because FastAPI calls json(), which refuses it, only for a body."""
        return await super().body() or b" "

    async def json(self) -> Any:
        """Return the body as its model, which FastAPI then passes on unchanged, parsed in a thread if it is large.

        Raises: RequestError, 400.
        """
        assert self._model is not None, "only a route with a model reads JSON"
        parse = partial(_parse, await self.body(), self._model)
        return await self.app.state.threads.run(parse, is_large=True) if self.is_large else parse()

    @property
    def key(self) -> str:
        """The digest of the client's API key, or "" without keys."""
        return str(self.state.key)

    @property
    def is_large(self) -> bool:
        """Whether the body, which was read, is so long that small requests must not wait for it."""
        return len(self._body) > LARGE


def _parse(body: bytes, model: type[BaseModel]) -> BaseModel:
    body = body.removeprefix(BOM_UTF8)  # a parser may ignore it (RFC 8259)
    is_packed = body.startswith(b"\x1f\x8b")
    if got := "nothing" if not body.strip() else "gzip" if is_packed else "UTF-16 or UTF-32" if 0 in body[:4] else "":
        raise RequestError(400, f"the body must be a JSON object in UTF-8, got {got}")
    if len(body) > LARGE:
        for kind, num, most in zip(
            ("values", "lists, objects and keys"), json_size(body), (MAX_VALUES, MAX_NESTED), strict=True
        ):
            if num > most:
                raise RequestError(400, f"the body has {num} {kind}; at most {most} are read")
    try:
        if not isinstance(value := from_json(body, allow_inf_nan=False), dict):
            hint = "; send each request on its own" if isinstance(value, list) else ""
            raise RequestError(400, f"the body must be one JSON object, got {body[:60].decode(errors='replace')}{hint}")
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error) from error
    except ValueError as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from error


def json_size(body: bytes) -> tuple[int, int]:
    r"""Count what a JSON text has outside strings, without parsing it: values (commas), and lists, objects and keys ([ { :).

    >>> json_size(rb'{"a": [1, 2, {}], "b": "[,\",{"}')
    (3, 5)
    """
    characters = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
    is_outside = np.bitwise_xor.accumulate((characters == ord('"')).view(np.uint8)) == 0
    num_commas, *nested = (int(np.count_nonzero((characters == ord(one)) & is_outside)) for one in ",[{:")
    return num_commas, sum(nested)


class StrictRoute(APIRoute):
    """A route whose requests are StrictRequests. Their bodies are JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strict(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":  # a page of any origin may send text/plain and forms
                raise RequestError(415, f"the body must be JSON, with Content-Type: application/json, got {kind[:100]!r}")
            if (coding := request.headers.get("content-encoding", "").strip().lower()) in CODINGS:
                raise RequestError(415, f"a body with Content-Encoding: {coding} is not read; send it uncompressed")
            return await handler(StrictRequest(request.scope, request.receive, model))

        return strict
