"""The endpoints for a trainer, which only `serve --enable-weight-update` adds: vLLM's names, with a checkpoint's folder.

    POST /pause?mode=wait|abort   no further requests are accepted (503), and those that run end
    POST /update_weights          {"path": folder}, which this machine can read: all weights are replaced
    POST /resume                  requests are accepted again
    GET  /get_world_size          the number of ranks

Whoever may call them decides what this server answers, and may make it read any folder. Use them with --api-key.
"""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.server.errors import json_response
from nanoinfer.server.protocol import Body


class UpdateRequest(Body):
    """The body of /update_weights. path: a checkpoint of the same model."""

    path: str


def add_weights(app: FastAPI, async_llm: AsyncLLM, world_size: int) -> None:
    def state() -> dict[str, Any]:
        engine = async_llm.engine
        return {"weights_version": engine.weights_version, "is_paused": "pause" in engine.refusals}

    @app.post("/pause")
    async def pause(mode: str = "wait") -> Response:
        await async_llm.pause(mode)
        return json_response(state())

    @app.post("/resume")
    async def resume() -> Response:
        await async_llm.between_steps(async_llm.llm.resume)
        return json_response(state())

    @app.post("/update_weights")
    async def update_weights(body: UpdateRequest) -> Response:
        body.check_unknown_fields()
        await async_llm.between_steps(lambda: async_llm.llm.update_weights_from_path(body.path))  # 400 if it does not fit
        return json_response(state())

    @app.get("/get_world_size")
    async def get_world_size() -> Response:
        return json_response({"world_size": world_size})
