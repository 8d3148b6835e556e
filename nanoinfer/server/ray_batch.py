"""A batch job on many machines: Ray starts actors, each of which holds an engine and answers batches of requests.

In: BatchRequests. Out: their results, in the order in which batches end, written only by this process, the driver. Ray
restarts an actor that dies, and gives it its batches again. A batch during which it has died MAX_DEATHS times is put aside. At
the end, its requests are answered one by one. A request with MAX_DEATHS further deaths gets an error as its result.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.server.app import create_app
from nanoinfer.server.batch import BatchRequest, answer_all, to_result
from nanoinfer.server.errors import error_body
from nanoinfer.server.protocol import JsonObject
from nanoinfer.server.run import share_the_process
from nanoinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanoinfer.server.async_llm import AsyncLLM

MAX_DEATHS = 2
BATCHES_PER_ACTOR = 2  # batches in flight, so that the engine has requests while a batch ends
LOCAL_OBJECT_STORE_BYTES = 2**28  # for the batches in flight. The rest is spilled to disk

Batch = list[BatchRequest]


@contextmanager
def connected(address: str, *, num_cpus: int) -> Iterator[None]:
    """Join a Ray cluster, or start a cluster on this machine for as long as the context lasts.

    address: "local", "auto" or host:port. num_cpus: those of a local cluster, which Ray only counts, without reserving them.
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
    options = {"scheduling_strategy": "SPREAD", "max_restarts": -1, "max_task_retries": MAX_DEATHS - 1}
    replica = ray.remote(**resources, **options)(BatchReplica)
    actors = [replica.remote(load, settings, seed) for _ in range(num_replicas)]

    def answer(batches: Iterator[Batch], num_at_once: int) -> list[Batch]:
        """Answer batches, num_at_once in each actor, and return those during which an actor has died MAX_DEATHS times."""
        deadly = list[Batch]()
        # An empty call ends when the actor has started, and batches go only to such actors.
        calls: dict[Any, tuple[Any, Batch]] = {
            actor.answer.remote([]): (actor, []) for actor in actors for _ in range(num_at_once)
        }
        while True:
            [done], _ = ray.wait([*calls])
            actor, batch = calls.pop(done)
            try:
                for result in ray.get(done):
                    write(result)
            except ActorUnavailableError:  # it restarts, but does not get this batch again
                deadly += [batch] if batch else []
            except RayError as error:  # only its text names the actor's own error class
                if own := re.findall(r"^nanoinfer\.errors\.\w+: (.+)$", str(error), re.MULTILINE):
                    raise NanoinferError(f"a replica failed: {own[-1]}") from error
                raise
            if batch := next(batches, []):
                calls[actor.answer.remote(batch)] = actor, batch
            elif not any(other for _, other in calls.values()):
                return deadly

    deadly = answer(iter(lambda: list(islice(requests, batch_size)), []), BATCHES_PER_ACTOR)
    for [request] in answer(([request] for batch in deadly for request in batch), 1):
        message = (
            f"{2 * MAX_DEATHS} processes died while they answered this request, "
            f"in the last {MAX_DEATHS} cases with no other request running"
        )
        write(to_result(request, seed, 500, error_body(500, message)))


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
