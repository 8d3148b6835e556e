"""A batch job: the requests of a file, answered by the server's application in this process, without a socket.

In: BatchRequests. Out: one result per request, in the order in which they end. Each is checked and answered as a request to
`nanoinfer serve`, with a seed that is computed from the job's seed and its custom_id unless it has its own. So the answers do
not depend on the order of the requests, nor, where LLM.batch_independent holds, on what else runs.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message

from nanoinfer.errors import EngineDeadError
from nanoinfer.server.batch_files import BatchRequest
from nanoinfer.server.errors import error_body

logger = logging.getLogger(__name__)


async def answer_all(
    app: ASGIApp, requests: Iterator[BatchRequest], *, seed: int, num_concurrent: int, write: Callable[[dict[str, Any]], object]
) -> None:
    """Answer every request, num_concurrent at a time, and pass each result to write.

    Raises:
        EngineDeadError: If the engine fails. The requests without a result are then unfinished.
    """

    async def work() -> None:
        for request in requests:
            write(await answer(app, request, seed))

    workers = [asyncio.create_task(work()) for _ in range(num_concurrent)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def answer(app: ASGIApp, request: BatchRequest, job_seed: int) -> dict[str, Any]:
    """Return the result of one request, unless the engine has failed."""
    body = request.body
    if body.get("seed") is None:
        body = body | {"seed": request_seed(job_seed, request.custom_id)}
    if body.get("stream"):
        status, reply = 400, error_body(400, "stream is not supported in a batch; leave it out", param="stream")
    else:
        status, reply = await post(app, request.url, body)
    if status == 503:
        raise EngineDeadError(reply["error"]["message"])
    return to_result(request, job_seed, status, reply)


def to_result(request: BatchRequest, job_seed: int, status: int, reply: dict[str, Any]) -> dict[str, Any]:
    """Make a line of the output, without what differs from run to run, so that equal jobs give equal bytes."""
    identity, error = f"{request_seed(job_seed, request.custom_id):016x}", None
    if status == 200:
        kind = reply["id"].partition("-")[0]
        reply |= {"id": f"{kind}-{identity}", "created": 0}
        del reply["usage"]["prompt_tokens_details"]
    else:
        error = {"code": reply["error"]["code"] or str(status), "message": reply["error"]["message"]}
    return {
        "id": f"batch_req_{identity}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": identity, "body": reply},
        "error": error,
    }


def request_seed(job_seed: int, custom_id: str) -> int:
    """Return the seed of a request, 64 bits."""
    key = job_seed.to_bytes(8)
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest)


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Send JSON to an ASGI application, and return the status and the JSON of the response."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    status, unread, received = 0, [{"type": "http.request", "body": to_json(body)}], b""

    async def receive() -> Message:
        return unread.pop() if unread else await asyncio.Future()  # the client never leaves

    async def send(message: Message) -> None:
        nonlocal status, received
        status = message.get("status", status)
        received += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        if status != 500:  # Starlette raises an internal error again, after the response
            raise
        logger.exception("a request of the batch failed")
    return status, from_json(received)
