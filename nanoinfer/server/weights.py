"""The endpoints for a trainer, which only `serve --enable-weight-update` adds: vLLM's names, with a checkpoint or its tensors.

    POST /pause?mode=wait|abort   no further requests are accepted (503), and those that run end
    POST /update_weights          {"path": folder}, which this machine can read: all weights are replaced
                                  a safetensors file as application/octet-stream: the weights in it are replaced
    POST /resume                  requests are accepted again
    GET  /get_world_size          the number of ranks

Whoever may call them decides what this server answers, and may make it read any folder. Use them with --api-key.
"""

import asyncio
from tempfile import NamedTemporaryFile

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from nanoinfer import rollouts
from nanoinfer.async_llm import AsyncLLM
from nanoinfer.server.answers import CLIENT_CLOSED_REQUEST
from nanoinfer.server.errors import json_response
from nanoinfer.server.limits import FILE, StrictRequest, media_type
from nanoinfer.server.protocol import Body


class UpdateRequest(Body):
    """The body of /update_weights in JSON. path: a checkpoint of the same model, or a .safetensors file."""

    path: str


_CONTENT = {"application/json": UpdateRequest.model_json_schema(), FILE: {"type": "string", "format": "binary"}}
_TWO_BODIES = {"requestBody": {"required": True, "content": {kind: {"schema": one} for kind, one in _CONTENT.items()}}}


def add_weights(app: FastAPI, async_llm: AsyncLLM, world_size: int) -> None:
    """Add the endpoints. Raises: UnsupportedError if the weights cannot be replaced."""
    llm, one_file_at_a_time = async_llm.llm, asyncio.Lock()
    app.state.max_file_bytes = rollouts.max_file_bytes(llm)

    def state() -> dict[str, object]:
        engine = async_llm.engine
        return {"weights_version": engine.weights_version, "is_paused": "pause" in engine.refusals}

    @app.post("/pause")
    async def pause(mode: str = "wait") -> Response:
        await async_llm.pause(mode)
        return json_response(state())

    @app.post("/resume")
    async def resume() -> Response:
        await async_llm.between_steps(llm.resume)
        return json_response(state())

    @app.post("/update_weights", openapi_extra=_TWO_BODIES)
    async def update_weights(http: StrictRequest) -> Response:
        if media_type(http.headers) != FILE:
            await update(await _path_of(http))
            return json_response(state())
        async with one_file_at_a_time:
            with NamedTemporaryFile(suffix=".safetensors") as file:  # which only this user can read
                try:
                    async for chunk in http.stream():
                        await asyncio.to_thread(file.write, chunk)
                except ClientDisconnect:
                    return Response(status_code=CLIENT_CLOSED_REQUEST)
                file.flush()
                await update(file.name)
        return json_response(state())

    async def update(path: str) -> None:
        await async_llm.between_steps(lambda: llm.update_weights_from_path(path))  # 400 if it does not fit

    @app.get("/get_world_size")
    async def get_world_size() -> Response:
        return json_response({"world_size": world_size})


async def _path_of(http: StrictRequest) -> str:
    try:
        body = UpdateRequest.model_validate(await http.json())
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error
    body.check_unknown_fields()
    return body.path
