"""Answer the requests of a file, a batch job, by the server's application in this process, without a socket.

In: a JSONL file in OpenAI's batch format. Out: a result per request, in the order in which they end. A request is checked and
answered like a request to `nanoinfer serve`, with a seed that is computed from the job's seed and its custom_id unless it has a
seed. So the answers do not depend on the order of the requests, nor, if LLM.batch_independent holds, on other requests.

Results are appended to OUTPUT.partial, after which an interrupted job continues, and which becomes OUTPUT at the end.
OUTPUT.manifest.json identifies the job, so that a job with another model, input or seed is refused.
"""

import asyncio
import hashlib
import json
import logging
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message

from nanoinfer.errors import EngineDeadError, InvalidValueError
from nanoinfer.server.errors import error_body, validation_message
from nanoinfer.server.protocol import JsonObject

logger = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LISTED = 10  # the most invalid lines in an error message
FSYNC_SECONDS = 5.0  # the results of these seconds may be lost by a power failure, but not by a killed process


class BatchRequest(BaseModel):
    """A line of the input."""

    model_config = ConfigDict(extra="forbid", strict=True)
    custom_id: str = Field(min_length=1, max_length=512)
    method: str = Field(pattern="^POST$")
    url: str = Field(pattern=f"^({'|'.join(URLS)})$")
    body: JsonObject


@dataclass(frozen=True)
class Manifest:
    """Everything that determines the bytes of a job's results."""

    input_digest: str
    num_requests: int
    model: dict[str, str]  # name -> digest, of the checkpoint's files
    options: JsonObject  # the engine's options that may change tokens
    seed: int


def check_requests(path: Path) -> tuple[str, int]:
    """Read the whole input before the job starts, refuse invalid lines, and return its digest and number of requests."""
    digest, num_requests, problems = hashlib.blake2b(digest_size=16), 0, []
    lines_by_id: dict[int, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if not line.strip():
                continue
            num_requests += 1
            try:
                request = BatchRequest.model_validate(from_json(line.removeprefix(BOM_UTF8)))
            except ValidationError as error:
                message, _ = validation_message([issue | {"loc": ("line", *issue["loc"])} for issue in error.errors()])
                problems.append(f"line {number}: {message}"[:200])
            except ValueError as error:
                problems.append(f"line {number} is not JSON: {error}"[:200])
            else:
                if (first_line := lines_by_id.setdefault(_key(request.custom_id), number)) != number:
                    problems.append(f"line {number} has the custom_id of line {first_line}, {request.custom_id[:50]!r}")
            if len(problems) == MAX_LISTED:
                break
    if problems:
        raise InvalidValueError(f"{path} is not a batch of requests; correct these lines:\n" + "\n".join(problems))
    if not num_requests:
        raise InvalidValueError(f"{path} has no requests; write one JSON object per line")
    return digest.hexdigest(), num_requests


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a checked input."""
    with path.open("rb") as file:
        yield from (BatchRequest.model_validate(from_json(line.removeprefix(BOM_UTF8))) for line in file if line.strip())


class ResultFile:
    """The results of a job, written by a single process."""

    def __init__(self, output: Path, manifest: Manifest, *, retry_errors: bool = False) -> None:
        """Begin a job, or continue it. retry_errors: whether requests whose results are errors are answered again."""
        self.num_errors = 0  # the number of results that are errors
        self._output = output
        self._partial = output.with_name(output.name + ".partial")
        self.manifest = manifest
        self._finished: set[int] = set()
        self._file: BinaryIO | None = None
        found = next((path for path in (output, self._partial) if path.exists()), None)
        before = read_manifest(output)
        if found is not None and before is None:
            raise InvalidValueError(f"{found} exists and has no manifest of a batch job; choose another output")
        self._lock = manifest_path(output).open("a+b")
        try:
            _lock(self._lock, output)
            if found is None or before is None:
                self._lock.truncate(0)
                self._lock.write(json.dumps(asdict(manifest), indent=1).encode() + b"\n")
                self._lock.flush()
            else:
                if changed := [name for name, value in asdict(manifest).items() if value != getattr(before, name)]:
                    raise InvalidValueError(
                        f"{found} belongs to a job with another {' and '.join(changed)}; choose another output, "
                        "or remove this one"
                    )
                self._read(found, retry_errors=retry_errors)
            if not output.exists():
                self._file = self._partial.open("ab", buffering=0)
        except BaseException:
            self._lock.close()
            raise
        self._last_fsync = time.monotonic()

    @property
    def num_finished(self) -> int:
        """The number of requests that have a result."""
        return len(self._finished)

    @property
    def is_complete(self) -> bool:
        return self.num_finished == self.manifest.num_requests

    def unanswered(self, path: Path) -> Iterator[BatchRequest]:
        """Yield the requests of the job's input that have no result yet."""
        return (request for request in read_requests(path) if _key(request.custom_id) not in self._finished)

    def append(self, result: JsonObject) -> None:
        """Add a result, which is in the file when this returns, and on the disk within some seconds."""
        assert self._file is not None, "an output that has its final name is complete"
        self._file.write(to_json(result) + b"\n")
        self._count(result)
        if time.monotonic() - self._last_fsync > FSYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._last_fsync = time.monotonic()

    def close(self) -> None:
        """Write the results to the disk, and give the file the output's name if it is complete."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            if self.is_complete:
                os.replace(self._partial, self._output)
        self._lock.close()

    def _count(self, result: dict[str, Any]) -> None:
        self._finished.add(_key(result["custom_id"]))
        self.num_errors += result["error"] is not None

    def _read(self, found: Path, *, retry_errors: bool) -> None:
        """Read the results, and remove an incomplete last line, which a killed process or a full disk may leave."""
        kept = found.with_name(found.name + ".new").open("wb") if retry_errors else None
        end = 0
        with found.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    result = from_json(line)
                    if kept is None or result["error"] is None:
                        self._count(result)
                        if kept is not None:
                            kept.write(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise InvalidValueError(f"{found} is corrupted in line {number}; remove that line") from error
        if kept is None:
            os.truncate(found, end)
            return
        with kept:
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(kept.name, self._partial)
        if found != self._partial:
            found.unlink()


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


def read_manifest(output: Path) -> Manifest | None:
    """Return the manifest of a job that was begun. None: the file is missing or unreadable."""
    try:
        return Manifest(**json.loads(manifest_path(output).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _key(custom_id: str) -> int:
    """Hash an id of any length to 128 bits, so that a million of them need about 100 MB."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest())


def _lock(file: BinaryIO, output: Path) -> None:
    """Keep a second process from writing the same job, on systems that have flock."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidValueError(f"another process is writing {output}; wait for it, or choose another output") from error


# ---- the answers


async def answer_all(
    app: ASGIApp, requests: Iterator[BatchRequest], *, seed: int, num_concurrent: int, write: Callable[[JsonObject], object]
) -> None:
    """Answer every request, num_concurrent at a time, and pass each result to write.

    Raises: EngineDeadError if the engine fails. The requests without a result are then unfinished.
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


async def answer(app: ASGIApp, request: BatchRequest, job_seed: int) -> JsonObject:
    """Return the result of a request, unless the engine has failed."""
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


def to_result(request: BatchRequest, job_seed: int, status: int, reply: dict[str, Any]) -> JsonObject:
    """Return a line of the output, without what differs from run to run, so that equal jobs give equal bytes."""
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


async def post(app: ASGIApp, path: str, body: JsonObject) -> tuple[int, Any]:
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
        if status != 500:  # after its response, Starlette raises an internal error again
            raise
        logger.exception("a request of the batch failed")
    return status, from_json(received)
