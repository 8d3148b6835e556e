"""A batch job on many machines: Ray Data gives batches of rows to actors, and each actor holds an engine.

In: rows. Out: their results, in the order in which batches end. Only this process, the driver, writes them. Ray restarts an
actor that dies and repeats its batches, without a limit. So Attempts counts how often each batch has begun. If MAX_DEATHS
actors die during a batch, its rows are answered one by one. A row during which MAX_DEATHS more die gets an error as its result.
"""

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow
import ray
import ray.data
from pydantic_core import from_json, to_json
from ray.exceptions import RayError

from nanoinfer.async_llm import AsyncLLM
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.server.app import ServerSettings, create_app
from nanoinfer.server.batch import answer, answer_all, to_result
from nanoinfer.server.errors import error_body
from nanoinfer.server.ledger import Row
from nanoinfer.server.run import share_the_process

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

MAX_DEATHS = 2
BATCHES_PER_ACTOR = 2  # in flight, so that the engine has rows while a batch ends
LOCAL_OBJECT_STORE_BYTES = 2**28  # for the rows: all are sent to it before the job starts. What does not fit is spilled to disk


@contextmanager
def connected(address: str, *, num_cpus: int) -> Iterator[None]:
    """Join a Ray cluster, or start one on this machine for as long as the context lasts.

    Args:
        address: "local", "auto" or host:port.
        num_cpus: The CPUs that a local cluster offers. Ray only counts them, and reserves nothing on the machine.

    Raises: InvalidValueError if there is no cluster.
    """
    try:
        if address == "local":
            ray.init(
                "local",
                num_cpus=num_cpus,
                object_store_memory=LOCAL_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level="WARNING",
            )
        else:
            ray.init(address, logging_level="WARNING")
    except (ConnectionError, ValueError) as error:
        raise InvalidValueError(
            f"there is no Ray cluster at {address!r} ({error}); give host:port, auto, or local for this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def answer_all_on_ray(
    rows: Iterator[Row],
    load: Callable[[], "LLM"],
    settings: ServerSettings,
    *,
    seed: int,
    num_replicas: int,
    batch_size: int,
    resources: dict[str, float],
    write: Callable[[dict[str, Any]], object],
) -> None:
    """Answer every row on the actors of the cluster that this process is connected to, and pass each result to write.

    Args:
        load: Makes the LLM of an actor.
        settings: What the endpoints of an actor need.
        batch_size: Rows that an actor takes at a time.
        resources: num_cpus and num_gpus that an actor reserves.

    Raises: NanoinferError if load or the engine raised one in an actor, with the message of that error. Otherwise Ray's error.
    The rows without a result are then unfinished.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    lines = (to_json(row.model_dump()) for row in rows)
    blocks = [pyarrow.table({"row": batch}) for batch in iter(lambda: list(islice(lines, batch_size)), [])]
    attempts = ray.remote(num_cpus=0)(Attempts).remote()
    results = ray.data.from_blocks(blocks).map_batches(
        Replica,
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
    except RayError as error:  # its text has the actor's traceback. Its class is not that of the actor's error
        own = re.findall(r"^nanoinfer\.errors\.\w+: (.+)$", str(error), re.MULTILINE)
        if not own:
            raise
        raise NanoinferError(f"a replica failed: {own[-1]}") from error


class Attempts:
    """An actor that keeps, for each unfinished batch, what must survive the death of a Replica.

    This is how often the batch has begun, and the results of rows that were answered alone. Each such result sets the count to
    MAX_DEATHS, plus one for the attempt that is running. So the attempts beyond MAX_DEATHS are those at the next row.
    """

    def __init__(self) -> None:
        self._num_begun: Counter[str] = Counter()
        self._results: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def get(self, batch: str) -> tuple[int, list[dict[str, Any]]]:
        return self._num_begun[batch], self._results[batch]

    def begin(self, batch: str) -> None:
        self._num_begun[batch] += 1

    def add(self, batch: str, result: dict[str, Any]) -> None:
        self._results[batch].append(result)
        self._num_begun[batch] = MAX_DEATHS + 1

    def end(self, batch: str) -> None:
        self._num_begun.pop(batch, None)
        self._results.pop(batch, None)


class Replica:
    """An actor that answers batches. Ray calls it for up to BATCHES_PER_ACTOR at once, in one event loop."""

    def __init__(self, load: Callable[[], "LLM"], settings: ServerSettings, seed: int, attempts: Any) -> None:
        self._app = create_app(AsyncLLM(load, streaming=False), settings)
        share_the_process()
        self._seed = seed
        self._attempts = attempts
        self._turns = asyncio.Semaphore(BATCHES_PER_ACTOR)
        self._alone = asyncio.Lock()

    async def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Turn the column "row" of JSON into a column "result" of JSON."""
        rows = [Row.model_validate(from_json(row.as_py())) for row in batch["row"]]
        key = rows[0].custom_id
        num_deaths, results = await self._attempts.get.remote(key)
        if num_deaths < MAX_DEATHS:
            async with self._turns:
                await self._attempts.begin.remote(key)
                await answer_all(self._app, iter(rows), seed=self._seed, num_concurrent=len(rows), write=results.append)
        else:
            async with self._alone, self._turns, self._turns:  # all turns: nothing else may kill the actor meanwhile
                await self._attempts.begin.remote(key)
                for row in rows[len(results) :]:
                    results.append(await self._answer_alone(row, num_deaths - MAX_DEATHS))
                    num_deaths = MAX_DEATHS
                    await self._attempts.add.remote(key, results[-1])
        await self._attempts.end.remote(key)
        return pyarrow.table({"result": [to_json(result) for result in results]})

    async def _answer_alone(self, row: Row, num_deaths: int) -> dict[str, Any]:
        if num_deaths < MAX_DEATHS:
            return await answer(self._app, row, self._seed)
        message = (
            f"{2 * MAX_DEATHS} processes died while they answered this row, "
            f"in the last {MAX_DEATHS} cases with no other row running"
        )
        return to_result(row, self._seed, 500, error_body(500, message))
