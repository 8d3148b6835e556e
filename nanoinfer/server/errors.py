"""Every error as OpenAI's {"error": {"message", "type", "param", "code"}}, without paths or tracebacks of this machine.

In: exceptions of nanoinfer, of FastAPI and of its checks. Out: a status and a short message.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nanoinfer.errors import EngineDeadError, NanoinferError, QueueFullError

logger = logging.getLogger(__name__)

MAX_ERRORS, MAX_CHARACTERS = 10, 200  # in the message for a body that does not validate
RETRY_AFTER = {429: "1", 503: "10"}  # seconds, which OpenAI's client follows up to 120
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_PATH = re.compile(r"(?<![\w.<])(?:[A-Za-z]:)?[/\\][\w.-]+(?:[/\\][\w.-]+)+")


class RequestError(HTTPException):
    """A refused request, with the name of the field (param) and OpenAI's code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def without_paths(message: str) -> str:
    """Remove paths of this machine from the message of an error.

    >>> without_paths("OSError: cannot read /home/me/model/config.json; see docs/models.md, 1/2")
    'OSError: cannot read <path>; see docs/models.md, 1/2'
    """
    return _PATH.sub("<path>", message)


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Response:
    headers = {"Retry-After": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    return json_response(error_body(status, message, param=param, code=code), status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception by an error body."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
        response = error_response(error.status_code, str(error.detail), param=param, code=code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = validation_message(error.errors())
        return error_response(400, message, param=param)

    @app.exception_handler(NanoinferError)
    async def unusable(request: Request, error: NanoinferError) -> Response:
        message = without_paths(str(error))
        if isinstance(error, QueueFullError):
            return error_response(429, message, code="queue_full")
        if isinstance(error, EngineDeadError):
            return error_response(503, message, code="engine_unavailable")
        return error_response(400, message)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(500, "internal error")  # Starlette raises it again, and uvicorn logs the traceback


def validation_message(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return one short message of pydantic's errors, and the first field."""
    lines = []
    for error in errors[:MAX_ERRORS]:
        field = ".".join(map(str, error["loc"][1:]))
        message = str(error["msg"]).removeprefix("Value error, ")
        if error["type"] == "extra_forbidden":
            message = "unknown field; leave it out"
        lines.append((f"{field}: {message}" if field else message)[:MAX_CHARACTERS])
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more")
    location = errors[0]["loc"]
    return "; ".join(lines), str(location[1]) if len(location) > 1 else None
