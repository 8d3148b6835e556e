"""A batch job on many machines: Ray Data gives batches of requests to actors, and each actor holds an engine.

In: BatchRequests. Out: their results, in the order in which batches end, written only by this process, the driver. Ray
restarts an actor that dies and repeats its batches without limit, so Attempts counts how often each batch was begun. If
MAX_DEATHS actors die during a batch, its requests are answered one by one. A request during which MAX_DEATHS more die gets an
error as its result.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow
import ray
import ray.data
from pydantic_core import from_json, to_json
from ray.exceptions import RayError

from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.server.app import create_app
from nanoinfer.server.batch import BatchRequest, answer, answer_all, to_result
from nanoinfer.server.errors import error_body
from nanoinfer.server.protocol import JsonObject
from nanoinfer.server.run import share_the_process
from nanoinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanoinfer.async_llm import AsyncLLM

MAX_DEATHS = 2
BATCHES_PER_ACTOR = 2  # batches in flight, so that the engine has requests while a batch ends
LOCAL_OBJECT_STORE_BYTES = 2**28  # for all requests, which are stored before the job starts. The rest is spilled to disk


@contextmanager
def connected(address: str, *, num_cpus: int) -> Iterator[None]:
    """Join a Ray cluster, or start a cluster on this machine for as long as the context lasts.

    Args:
        address: "local", "auto" or host:port.
        num_cpus: the number of CPUs of a local cluster, which Ray only counts, without reserving them.
    """
    local = {"num_cpus": num_cpus, "object_store_memory": LOCAL_OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(address, logging_level="WARNING", **(local if address == "local" else {}))
    except (ConnectionError, ValueError) as error:
        raise InvalidValueError(
            f"there is no Ray cluster at {address!r} ({error}); give host:port, auto, or local for this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def answer_all_on_ray(
    requests: Iterator[BatchRequest],
    load: Callable[[], "AsyncLLM"],
    settings: ServerSettings,
    *,
    seed: int,
    num_replicas: int,
    batch_size: int,
    resources: dict[str, float],
    write: Callable[[JsonObject], object],
) -> None:
    """Answer every request on the actors of the connected cluster, and pass each result to write.

    Each actor makes an AsyncLLM by load, takes batch_size requests at a time and reserves the resources, num_cpus and num_gpus.
    An error of load or of the engine in an actor is raised here as a NanoinferError. Requests may then have no result.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    lines = (to_json(request.model_dump()) for request in requests)
    blocks = [pyarrow.table({"request": batch}) for batch in iter(lambda: list(islice(lines, batch_size)), [])]
    attempts = ray.remote(num_cpus=0)(Attempts).remote()
    results = ray.data.from_blocks(blocks).map_batches(
        BatchReplica,
        fn_constructor_args=(load, settings, seed, attempts),
        batch_size=None,  # a block is a batch
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_replicas, max_concurrent_calls_per_actor=BATCHES_PER_ACTOR),
        **resources,
    )
    del blocks
    try:
        for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
            for result in batch["result"]:
                write(from_json(result.as_py()))
    except RayError as error:  # only its text, with the actor's traceback, names the actor's error class
        own = re.findall(r"^nanoinfer\.errors\.\w+: (.+)$", str(error), re.MULTILINE)
        if not own:
            raise
        raise NanoinferError(f"a replica failed: {own[-1]}") from error


class Attempts:
    """An actor that keeps, for each unfinished batch, the state that must survive the death of a BatchReplica.

    This is the number of attempts, and the results of requests that were answered alone. Each such result sets the number
    to MAX_DEATHS plus the running attempt, so the attempts beyond MAX_DEATHS are those at the next request.
    """

    def __init__(self) -> None:
        self._states: dict[str, tuple[int, list[JsonObject]]] = {}

    def get(self, batch: str) -> tuple[int, list[JsonObject]]:
        return self._states.get(batch, (0, []))

    def put(self, batch: str, num_begun: int, results: list[JsonObject]) -> None:
        self._states[batch] = num_begun, results

    def end(self, batch: str) -> None:
        del self._states[batch]


class BatchReplica:
    """An actor that answers batches, up to BATCHES_PER_ACTOR of them at once in an event loop."""

    def __init__(self, load: Callable[[], "AsyncLLM"], settings: ServerSettings, seed: int, attempts: Any) -> None:
        self._app = create_app(load(), settings)
        share_the_process()
        self._seed = seed
        self._attempts = attempts
        self._turns = asyncio.Semaphore(BATCHES_PER_ACTOR)
        self._alone = asyncio.Lock()

    async def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Turn a column "request" of JSON into a column "result" of JSON."""
        requests = [BatchRequest.model_validate(from_json(cell.as_py())) for cell in batch["request"]]
        key = requests[0].custom_id
        num_deaths, results = await self._attempts.get.remote(key)
        if num_deaths < MAX_DEATHS:
            async with self._turns:
                await self._attempts.put.remote(key, num_deaths + 1, results)
                await answer_all(self._app, iter(requests), seed=self._seed, num_concurrent=len(requests), write=results.append)
        else:
            async with self._alone, self._turns, self._turns:  # all turns, so that no other batch can kill the actor
                await self._attempts.put.remote(key, num_deaths + 1, results)
                for request in requests[len(results) :]:
                    results.append(await self._answer_alone(request, num_deaths - MAX_DEATHS))
                    num_deaths = MAX_DEATHS
                    await self._attempts.put.remote(key, MAX_DEATHS + 1, results)
        await self._attempts.end.remote(key)
        return pyarrow.table({"result": [to_json(result) for result in results]})

    async def _answer_alone(self, request: BatchRequest, num_deaths: int) -> JsonObject:
        if num_deaths < MAX_DEATHS:
            return await answer(self._app, request, self._seed)
        message = (
            f"{2 * MAX_DEATHS} processes died while they answered this request, "
            f"in the last {MAX_DEATHS} cases with no other request running"
        )
        return to_result(request, self._seed, 500, error_body(500, message))
