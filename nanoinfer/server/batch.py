"""A batch job: the requests of a file, answered by the server's application in this process, without a socket.

In: rows. Out: one result per row, in the order in which they end. A row is checked and answered as a request to
`nanoinfer serve` is. Its seed is computed from the job's seed and its custom_id, unless it has its own. So the answers do not
depend on the order of the rows, and where LLM.batch_independent holds, not on what else runs.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message

from nanoinfer.errors import EngineDeadError
from nanoinfer.server.errors import error_body
from nanoinfer.server.ledger import Row

logger = logging.getLogger(__name__)


async def answer_all(
    app: ASGIApp, rows: Iterator[Row], *, seed: int, num_concurrent: int, write: Callable[[dict[str, Any]], object]
) -> None:
    """Answer every row, num_concurrent at a time, and pass each result to write.

    Raises: EngineDeadError if the engine fails. Then the rows without a result are unfinished.
    """

    async def work() -> None:
        for row in rows:
            write(await answer(app, row, seed))

    workers = [asyncio.create_task(work()) for _ in range(num_concurrent)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def answer(app: ASGIApp, row: Row, job_seed: int) -> dict[str, Any]:
    """The result of one row. Raises: EngineDeadError."""
    body = row.body if row.body.get("seed") is not None else row.body | {"seed": row_seed(job_seed, row.custom_id)}
    if body.get("stream"):
        status, reply = 400, error_body(400, "stream is not supported in a batch; leave it out", param="stream")
    else:
        status, reply = await post(app, row.url, body)
    if status == 503:
        raise EngineDeadError(reply["error"]["message"])
    return to_result(row, job_seed, status, reply)


def to_result(row: Row, job_seed: int, status: int, reply: dict[str, Any]) -> dict[str, Any]:
    """A line of the output. What differs from run to run is left out of reply, so that equal jobs give equal bytes."""
    identity, error = f"{row_seed(job_seed, row.custom_id):016x}", None
    if status == 200:
        kind = reply["id"].partition("-")[0]
        reply |= {"id": f"{kind}-{identity}", "created": 0}
        del reply["usage"]["prompt_tokens_details"]
    else:
        error = {"code": reply["error"]["code"] or str(status), "message": reply["error"]["message"]}
    return {
        "id": f"batch_req_{identity}",
        "custom_id": row.custom_id,
        "response": {"status_code": status, "request_id": identity, "body": reply},
        "error": error,
    }


def row_seed(job_seed: int, custom_id: str) -> int:
    """The seed of a row, 64 bits."""
    key = job_seed.to_bytes(8)
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest)


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Send JSON to an ASGI application. Returns the status and the JSON of the response."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
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
        logger.exception("a row failed")
    return status, from_json(received)
