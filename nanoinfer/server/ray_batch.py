"""A batch job on many machines: Ray starts actors, each of which holds an engine and answers batches of requests.

In: BatchRequests. Out: their results, in the order in which batches end, written only by this process, the driver. An actor
that dies is replaced, and its batches are answered again. A batch during which MAX_DEATHS actors have died is put aside. At the
end, its requests are answered one by one. A request during which MAX_DEATHS more actors die gets an error as its result.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.server.app import create_app
from nanoinfer.server.batch import BatchRequest, answer_all, to_result
from nanoinfer.server.errors import error_body
from nanoinfer.server.protocol import JsonObject
from nanoinfer.server.run import share_the_process
from nanoinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanoinfer.async_llm import AsyncLLM

MAX_DEATHS = 2
BATCHES_PER_ACTOR = 2  # batches in flight, so that the engine has requests while a batch ends
LOCAL_OBJECT_STORE_BYTES = 2**28  # for the batches in flight. The rest is spilled to disk

Batch = list[BatchRequest]


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
            f"there is no Ray cluster at {address!r} that this process may join ({error}); give host:port, auto, or local for "
            "this machine alone. Where Ray's own messages say InvalidAuthToken, RAY_AUTH_TOKEN must be the cluster's token, or "
            "RAY_AUTH_MODE=disabled be set for the cluster and for this process"
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
    """Answer every request on actors of the connected cluster, and pass each result to write.

    Each actor makes an AsyncLLM by load, takes batch_size requests at a time and reserves the resources, num_cpus and num_gpus.
    An error of load or of the engine in an actor is raised here as a NanoinferError. Requests may then have no result.
    """
    replica = ray.remote(**resources, scheduling_strategy="SPREAD")(BatchReplica)
    actors = [replica.remote(load, settings, seed) for _ in range(num_replicas)]

    def answer(batches: Iterator[Batch], num_at_once: int) -> list[Batch]:
        """Answer batches, num_at_once in each actor, and return those during which MAX_DEATHS actors have died."""
        interrupted, deadly = list[tuple[Batch, int]](), list[Batch]()
        calls: dict[Any, tuple[int, Any, Batch, int]] = {}  # result -> index of the actor, the actor, batch, deaths during it

        def call(index: int, batch: Batch, num_deaths: int = 0) -> None:
            calls[actors[index].answer.remote(batch)] = index, actors[index], batch, num_deaths

        for index in range(num_replicas):
            for _ in range(num_at_once):
                call(index, [])  # an empty call ends when the actor has started, and batches go only to such actors
        while True:
            [done], _ = ray.wait([*calls])
            index, actor, batch, num_deaths = calls.pop(done)
            try:
                results = ray.get(done)
            except RayError as error:
                _raise_own(error)
                if actors[index] is actor:  # only the first of the dead actor's calls replaces it
                    actors[index] = replica.remote(load, settings, seed)
                if batch and num_deaths + 1 < MAX_DEATHS:
                    interrupted.append((batch, num_deaths + 1))
                elif batch:
                    deadly.append(batch)
                call(index, [])
                continue
            for result in results:
                write(result)
            batch, num_deaths = interrupted.pop() if interrupted else (next(batches, []), 0)
            if batch:
                call(index, batch, num_deaths)
            elif not any(other for _, _, other, _ in calls.values()):
                return deadly

    deadly = answer(iter(lambda: list(islice(requests, batch_size)), []), BATCHES_PER_ACTOR)
    for [request] in answer(([request] for batch in deadly for request in batch), 1):
        message = (
            f"{2 * MAX_DEATHS} processes died while they answered this request, "
            f"in the last {MAX_DEATHS} cases with no other request running"
        )
        write(to_result(request, seed, 500, error_body(500, message)))


def _raise_own(error: RayError) -> None:
    """Raise an actor's error unless its process has died. Only the text of the error names the actor's own error class."""
    if own := re.findall(r"^nanoinfer\.errors\.\w+: (.+)$", str(error), re.MULTILINE):
        raise NanoinferError(f"a replica failed: {own[-1]}") from error
    if not isinstance(error, RayActorError):
        raise error


class BatchReplica:
    """An actor that answers batches in an event loop."""

    def __init__(self, load: Callable[[], "AsyncLLM"], settings: ServerSettings, seed: int) -> None:
        self._app = create_app(load(), settings)
        share_the_process()
        self._seed = seed

    async def answer(self, batch: Batch) -> list[JsonObject]:
        """Return the results of some requests."""
        results: list[JsonObject] = []
        await answer_all(self._app, iter(batch), seed=self._seed, num_concurrent=len(batch), write=results.append)
        return results
