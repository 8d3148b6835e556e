"""Every error as OpenAI's {"error": {"message", "type", "param", "code"}}, without paths or tracebacks of this machine.
Those of /v1/messages have Anthropic's types of errors and its "type": "error" in addition.

In: exceptions of nanoinfer, of FastAPI and of its checks. Out: a status and a short message.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from nanoinfer.engine.inputs import TooLong
from nanoinfer.errors import (
    EngineDeadError,
    EnginePausedError,
    HelperProcessError,
    InvalidPromptError,
    NanoinferError,
    OutOfThreadsError,
    QueueFullError,
    shown,
)
from nanoinfer.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MAX_ERRORS, MAX_CHARACTERS = 10, 200  # the most errors, and characters of each, in the message for an invalid body
MAX_MESSAGE = 2000  # the most characters of any other message
_HEADERS = {
    401: {"x-should-retry": "false"},  # otherwise Claude Code repeats a request with a wrong key for three minutes
    429: {"Retry-After": "1"},  # in seconds, which OpenAI's client follows up to 120
    503: {"Retry-After": "10"},
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MESSAGES = "/v1/messages"
_MESSAGES_TYPES = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_PARAMETERS = SamplingParams.__dataclass_fields__.keys() | {
    "stream_options", "top_logprobs", "messages", "tools", "tool_choice", "chat_template_kwargs", "continue_final_message",
    "priority", "dimensions", "truncate_prompt_tokens", "add_special_tokens", "instruction",
}  # fmt: skip
_FORMATS = ("json", "json_object", "regex", "choice", "grammar")  # subjects of errors about structured_outputs
_SCHEMAS = {"structured_outputs": ".json", "response_format": ".json_schema.schema"}  # where the fields hold a schema
_SUBJECT = re.compile(r"(?:each (?:\w+ )?of )?(\w+)")
_PATH = re.compile(
    r"""(?<=(['"]))(?:[A-Za-z]:)?[/\\][^'"]*[/\\][^'"]+(?=\1)"""  # in quotes, where it may have spaces
    r"""|(?<![\w.<])(?:[A-Za-z]:)?[/\\][^\s/\\'"<>:;,()]+(?:[/\\][^\s/\\'"<>:;,()]+)+"""
)


class ErrorFields(BaseModel):
    """The fields of every error. param: the field that is wrong. code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorFields


class MessagesErrorFields(ErrorFields):
    """The fields of an error of /v1/messages. details: {"error_code": code}, where Anthropic's clients look for the code."""

    details: dict[str, str] | None = None


class MessagesErrorBody(BaseModel):
    """The body of an error of /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorFields


Responses = dict[int | str, dict[str, Any]]  # status -> description, for /openapi.json
ERRORS: Responses = {"default": {"model": ErrorBody, "description": "an error, with status 4xx or 5xx (docs/serving.md)"}}
MESSAGES_ERRORS: Responses = {"default": ERRORS["default"] | {"model": MessagesErrorBody}}


def text_body(kind: str) -> Responses:
    """Describe a body of status 200 that is a text of this type."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}


class RequestError(HTTPException):
    """A refused request, with the name of the field (param) and OpenAI's code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


def invalid_body(error: ValidationError) -> RequestError:
    """Return the error for a body that is not its model."""
    message, param = validation_message([one | {"loc": ("body", *one["loc"])} for one in error.errors()])
    return RequestError(400, message, param=param)


class ContextLengthError(RequestError):
    """A prompt that is too long for the model."""

    def __init__(self, error: TooLong) -> None:
        super().__init__(400, error.message, code="context_length_exceeded")
        self.num_tokens, self.max_tokens = error.num_tokens, error.max_tokens


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None, path: str = ""
) -> dict[str, Any]:
    """Return the body of an error of the endpoint at this path."""
    is_message = path.startswith(_MESSAGES)
    types = _TYPES | _MESSAGES_TYPES if is_message else _TYPES
    server_error = "api_error" if is_message else "server_error"
    kind = types.get(status, server_error if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    details = {"details": {"error_code": code}} if code else {}
    return {"type": "error", "error": error | details} if is_message else {"error": error}


def without_paths(message: str) -> str:
    """Remove paths of this machine from an error message, and cut off the end of a long message.

    >>> without_paths("OSError: cannot read /home/me/model/config.json; see docs/models.md, 1/2")
    'OSError: cannot read <path>; see docs/models.md, 1/2'
    """
    return _PATH.sub("<path>", message[:MAX_MESSAGE])


def subject(message: str) -> str | None:
    """Return the parameter with which an error message begins, or None.

    >>> subject("top_p must be in (0, 1], got 2"), subject("each id of logit_bias must be >= 0, got -1"), subject("no text")
    ('top_p', 'logit_bias', None)
    """
    found = _SUBJECT.match(message)
    return found[1] if found and found[1] in _PARAMETERS else None


def refused_format(message: str, field: str) -> RequestError | None:
    """Return the error for a format of the answer, in which the client's field has the place of structured_outputs.

    None: the message is not about a format.

    >>> refused_format("structured_outputs cannot be used with strict tool calls", "text.format").detail
    'text.format cannot be used with strict tool calls'
    """
    found, named = _SUBJECT.match(message), message
    if message.startswith("json."):
        named = f"{field}{_SCHEMAS.get(field, '.schema')}{message.removeprefix('json')}"
    elif found and found[1] in _FORMATS:
        named = f"{field}: {message}"
    elif "structured_outputs" in message:
        named = without_paths(message.replace("structured_outputs", field))
    elif not message.startswith("tools["):
        return None
    param = field.partition(".")[0] if named.startswith(field) else subject(message)
    return RequestError(400, named[:MAX_MESSAGE], param=param)  # a path in it is the client's own, such as a regex


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None, path: str = "") -> Response:
    return json_response(error_body(status, message, param=param, code=code, path=path), status, _HEADERS.get(status))


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = to_json(value, inf_nan_mode="null")  # a model may write infinity as a tool's argument
    return Response(content, status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception with an error body."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
        message = str(error.detail)
        if isinstance(error, ContextLengthError):
            param = _prompt_of(request)
            if request.url.path.startswith(_MESSAGES):  # Anthropic's words, by which its clients recognise the error
                message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum. {message}"
        if request.url.path.startswith(_MESSAGES) and param == "tools":  # Anthropic's name, too
            message = message.replace(".parameters", ".input_schema", 1)
        if (error.status_code, message) == (404, "Not Found"):  # Starlette's own 404
            message = f"there is no {request.url.path[:100]}; /openapi.json describes the paths, and / is a web page"
            if request.url.path.startswith("/api/"):
                hint = "use OpenAI's, such as /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models"
                message = f"there is no {request.url.path[:100]}, because this server does not have ollama's API; {hint}"
        elif error.status_code == 405:
            methods = ", ".join(_methods_of(request))
            message = f"{request.url.path[:100]} does not take {request.method}; use {methods}"
            error.headers = {"Allow": methods}
        response = error_response(error.status_code, message, param=param, code=code, path=request.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = validation_message(error.errors())
        return error_response(400, message, param=param, path=request.url.path)

    @app.exception_handler(NanoinferError)
    async def unusable(request: Request, error: NanoinferError) -> Response:
        message, path = without_paths(str(error)), request.url.path
        if isinstance(error, QueueFullError):
            return error_response(429, message, code="queue_full", path=path)
        if isinstance(error, EngineDeadError | EnginePausedError):
            return error_response(503, message, code="engine_unavailable", path=path)
        if isinstance(error, HelperProcessError | OutOfThreadsError):
            return error_response(500, message, path=path)
        param = _prompt_of(request) if isinstance(error, InvalidPromptError) else subject(message)
        return error_response(400, message, param=param, path=path)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # Starlette raises it again, and uvicorn logs the traceback.
        return error_response(500, "internal error", path=request.url.path)


def _methods_of(request: Request) -> list[str]:
    """Return the methods that the path of a request takes. Starlette names only those of the first route."""
    routes: list[BaseRoute] = request.app.routes
    return sorted(m for route in routes if route.matches(request.scope)[0] != Match.NONE for m in getattr(route, "methods", ()))


def _prompt_of(request: Request) -> str:
    """Return the name of the field that holds the prompt."""
    path = request.url.path
    if path.startswith(("/v1/responses", "/v1/embeddings")):
        return "input"
    if path.endswith(("/score", "/rerank")):
        return "documents"
    return "messages" if "/chat/" in path or path.startswith(_MESSAGES) else "prompt"


def validation_message(errors: Sequence[Any]) -> tuple[str, str | None]:
    """Return a short message for pydantic's errors, and the first field."""
    lines = []
    for error in errors[:MAX_ERRORS]:
        field = ".".join(str(part) for part in error["loc"][1:] if not str(part).startswith("<"))  # without tags such as <ids>
        message, value = str(error["msg"]).removeprefix("Value error, "), error.get("input", [])
        if error["type"] != "value_error" and (value is None or isinstance(value, str | int | float)):
            message += f", got {shown(value)}"
        lines.append((f"{field}: {message}" if field else message)[:MAX_CHARACTERS])
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more")
    location = errors[0]["loc"]
    return "; ".join(lines), str(location[1]) if len(location) > 1 else subject(lines[0])
