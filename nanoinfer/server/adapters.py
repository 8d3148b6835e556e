"""The endpoints that load and drop adapters, which only `serve --enable-lora-update` adds. The names are vLLM's.

    POST /v1/load_lora_adapter     {"lora_name": name, "lora_path": folder}: a request's model may have this name from now on
    POST /v1/unload_lora_adapter   {"lora_name": name}: requests that use it go on, and no others get it

Whoever may call them may make this server read any folder, and download any repository of the hub. Use them with --api-key.
"""

import asyncio
from collections.abc import Sequence
from itertools import count

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.lora.request import LoRARequest
from nanoinfer.server.errors import RequestError
from nanoinfer.server.protocol import Body

SENTENCE: dict[int | str, dict[str, object]] = {200: {"content": {"text/plain": {}}}}  # and JSON for errors


class LoadAdapterRequest(Body):
    """The body of /v1/load_lora_adapter. load_inplace: whether it may replace an adapter with the same name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Body):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


def add_adapters(app: FastAPI, async_llm: AsyncLLM, served: dict[str, LoRARequest], model_names: Sequence[str]) -> None:
    """Add the endpoints. served: the adapters by their names, which are changed."""
    lock, ids = asyncio.Lock(), count(1 + max((one.lora_int_id for one in served.values()), default=0))

    @app.post("/v1/load_lora_adapter", response_class=Response, responses=SENTENCE)
    async def load(body: LoadAdapterRequest) -> PlainTextResponse:
        body.check_unknown_fields()
        name = body.lora_name
        async with lock:
            if name in model_names or (name in served and not body.load_inplace):
                message = f"the name {name[:100]!r} is taken; choose another, or load an adapter again with load_inplace"
                raise RequestError(400, message, param="lora_name")
            request = LoRARequest(name, next(ids), body.lora_path)
            await async_llm.add_lora(request)  # 400 if it does not fit
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
