"""Endpoints that change the weights or the adapters of a server, under vLLM's names. Two options of `serve` add them.

In: folders and files that this machine can read. Out: the same server with other weights (for a trainer,
--enable-weight-update), or with further names of models (--enable-lora-update). docs/serving.md lists the endpoints.

Their callers decide what this server answers, and may make it read any folder, or download any repository of the hub.
Use them with --api-key.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Literal

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.training import update
from nanoinfer.server.async_llm import AsyncLLM
from nanoinfer.server.errors import RequestError, text_body
from nanoinfer.server.protocol import Body, JsonObject


class UpdateRequest(Body):
    """The body of /update_weights. path: a checkpoint of the same model, or a .safetensors file."""

    path: str


def add_weights(app: FastAPI, async_llm: AsyncLLM) -> None:
    """Add the endpoints. Raises: UnsupportedError if the weights cannot be replaced."""
    llm = async_llm.llm
    origin = update.origin_of(update.runner_of(llm.engine))

    def status() -> JsonObject:
        engine = async_llm.engine
        return {"weights_version": engine.weights_version, "is_paused": "pause" in engine.refusals}

    @app.post("/pause")
    async def pause(body: Body, mode: Literal["wait", "abort"] = "wait") -> JsonObject:
        body.check_unknown_fields()
        await async_llm.pause(mode)
        return status()

    @app.post("/resume")
    async def resume(body: Body) -> JsonObject:
        body.check_unknown_fields()
        await async_llm.between_steps(llm.resume)
        return status()

    @app.post("/update_weights")
    async def update_weights(body: UpdateRequest) -> JsonObject:
        body.check_unknown_fields()
        await async_llm.between_steps(lambda: llm.update_weights_from_path(body.path))  # an error becomes status 400
        return status()

    @app.get("/get_world_size")
    async def get_world_size() -> JsonObject:
        return {"world_size": origin.config.tensor_parallel_size}


# ---- adapters

SENTENCE = text_body("text/plain")  # a sentence, or JSON for errors


class LoadAdapterRequest(Body):
    """The body of /v1/load_lora_adapter. load_inplace: whether it may replace an adapter with the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


def add_adapters(app: FastAPI, async_llm: AsyncLLM, served: dict[str, LoRARequest], model_names: Sequence[str]) -> None:
    """Add the endpoints. served: name -> adapter, which the endpoints change."""
    lock, ids = asyncio.Lock(), count(1 + max((adapter.lora_int_id for adapter in served.values()), default=0))

    @app.post("/v1/load_lora_adapter", response_class=Response, responses=SENTENCE)
    async def load(body: LoadAdapterRequest) -> PlainTextResponse:
        body.check_unknown_fields()
        name = body.lora_name
        async with lock:
            if name in model_names or (name in served and not body.load_inplace):
                message = f"the name {name[:100]!r} is taken; choose another, or load an adapter again with load_inplace"
                raise RequestError(400, message, param="lora_name")
            request = LoRARequest(name, next(ids), body.lora_path)
            await async_llm.add_lora(request)  # an error becomes status 400
            previous, served[name] = served.get(name), request
            if previous is not None:
                await async_llm.remove_lora(previous.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_class=Response, responses=SENTENCE)
    async def unload(body: UnloadAdapterRequest) -> PlainTextResponse:
        body.check_unknown_fields()
        async with lock:
            if body.lora_name not in served:
                raise RequestError(404, f"there is no adapter {body.lora_name[:100]!r}; /v1/models lists those there are")
            await async_llm.remove_lora(served.pop(body.lora_name).lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
