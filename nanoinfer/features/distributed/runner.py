"""The calls that rank 0 makes together with the workers: it sends each call to them, and all ranks make it.

In: on rank 0, a ForwardBatch, rows for the LM head, or a function to call. Out: hidden rows, logits or tokens, on every rank. A
step's batch is sent as the lists of integers that it was made of, a few kilobytes, plus an adapter if a step brings it into a
slot. Commands go through separate connections instead of collectives, so that a worker can wait for days and both sides notice
at once when the other has ended.

On GPUs rank 0 reads nothing back: it draws alone, from the logits of all ranks, and its GPU gives the others the ids that it
has drawn.
"""

import io
import os
import pickle
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.errors import EngineDeadError, first_line
from nanoinfer.execution.forward_batch import BatchLists, ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner, Replayer, RunnerWrapper, T
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.distributed import split_sampling
from nanoinfer.features.distributed.communicator import Communicator, RankLostError
from nanoinfer.features.distributed.sharding import Shards, VocabularyHead
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.routes import Route
from nanoinfer.sampling.sampler import HeadRows
from nanoinfer.system.transfer import on_device

REPORT_SECONDS = 3.0  # the longest wait for a worker's last report
EXIT_SECONDS = 5.0  # the time that a worker has to end before it is killed

READY, FAILED, LOST = "ready", "failed", "lost"  # reports of workers. FAILED and LOST have a text
FORWARD, LOGITS, SAMPLE, CALL = "forward", "logits", "sample", "call"  # the commands to workers


class Workers:
    """The connections to ranks 1, 2 and so on, and their processes if this process has started them.

    The workers end when this object is garbage collected or this process ends, also if it is killed.
    """

    def __init__(self, connections: list[Connection], processes: list["subprocess.Popen[bytes]"]) -> None:
        self._connections, self._size = connections, len(connections) + 1
        self._processes = processes
        self._error: str | None = None
        self._lock = threading.Lock()  # while a process ends, a store may read blocks while an engine's thread still runs steps
        self._close = weakref.finalize(self, _end, os.getpid(), connections, processes)

    def wait_until_ready(self) -> None:
        """Wait until every worker has started. Raises: EngineDeadError with the report of a worker that has failed."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                report, text = connection.recv()
            except (EOFError, OSError) as error:
                raise RankLostError("a worker did not start") from error
            if report != READY:
                raise EngineDeadError(self._failure(rank, text))

    @contextmanager
    def together(self, *command: object) -> Iterator[None]:
        """Send a command to the workers. This rank must execute the same command inside the context.

        Raises: EngineDeadError if a rank has ended or failed, now or earlier.
        """
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(self._error)
            with self.watched():
                self.send(command)
                yield

    def send(self, message: object) -> None:
        """Send a message to all workers."""
        packed = pack(message)
        try:
            for connection in self._connections:
                connection.send_bytes(packed)
        except OSError as error:
            raise RankLostError("a worker has ended") from error

    def check(self) -> None:
        """Raise RankLostError if a worker has sent anything, because workers send only the report of their end."""
        if any(connection.poll() for connection in self._connections):
            raise RankLostError("a worker has ended")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the work of all ranks in this context, and end the workers if it raises, because the ranks then disagree.

        Raises: EngineDeadError if the cause is on another rank. An error of this rank is raised as it is.
        """
        try:
            yield
        except RankLostError as error:
            self._error = self._explain(error)
            self._close()
            raise EngineDeadError(self._error) from error
        except BaseException as error:
            self._error = self._failure(0, first_line(error))
            self._close()
            raise

    def _failure(self, rank: int, text: str) -> str:
        return f"rank {rank} of {self._size} failed: {text}; make a new LLM"

    def _explain(self, error: BaseException) -> str:
        """Find the rank that ended first, because the other ranks lose their connection to it and end as well."""
        pending = {connection: rank for rank, connection in enumerate(self._connections, start=1)}
        deadline = time.monotonic() + REPORT_SECONDS
        while pending and (seconds := deadline - time.monotonic()) > 0:
            for ready in wait(list(pending), seconds):
                assert isinstance(ready, Connection)
                try:
                    report, text = ready.recv()
                except (EOFError, OSError):
                    return self._explain_end(pending[ready])
                if report == FAILED:
                    return self._failure(pending[ready], text)
                if report == LOST:
                    del pending[ready]
        return f"{first_line(error)}; make a new LLM"

    def _explain_end(self, rank: int) -> str:
        how = "has ended"
        if self._processes:
            with suppress(subprocess.TimeoutExpired):
                status = self._processes[rank - 1].wait(EXIT_SECONDS)
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with exit status {status}"
        return (
            f"rank {rank} of {self._size} {how}; make a new LLM. If the system has killed it for want of memory, use a smaller "
            "dtype, less kv_cache_memory, or fewer ranks on this machine"
        )


def _end(owner: int, connections: list[Connection], processes: list["subprocess.Popen[bytes]"]) -> None:
    """End the workers by closing their connections and standard inputs."""
    if os.getpid() != owner:
        return  # in a fork, the workers belong to the process that started them
    for connection in connections:
        connection.close()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + EXIT_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class LeadingShards(Shards):
    """The Shards of rank 0, whose engine's calls run on the workers as well."""

    def __init__(self, communicator: Communicator, workers: Workers) -> None:
        super().__init__(communicator)
        self.workers = workers

    def connect(self, runtime: Runtime) -> Runtime:
        routes = runtime.routes
        if routes and reads_at_once(runtime.device):  # with enforce_eager there are none
            model: Any = runtime.model
            routes = (SplitSampling(model.lm_head, self.workers), *routes)
        wrap = partial(LeadingRunner, workers=self.workers, communicator=self.communicator)
        return replace(super().connect(runtime), routes=routes, wrappers=(*runtime.wrappers, wrap))


class LeadingRunner(RunnerWrapper):
    """The runner of rank 0, whose calls the workers make as well."""

    def __init__(self, inner: ModelRunner, workers: Workers, communicator: Communicator) -> None:
        super().__init__(inner)
        self.workers, self.communicator = workers, communicator
        self.graphs = None if inner.graphs is None else LeadingGraphs(inner.graphs, workers)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        assert batch.lists is not None
        lists = batch.lists._replace(extras=batch.extras)
        if reads_at_once(batch.input_ids.device):
            lists = lists._replace(input_ids=batch.input_ids.tolist())
        with self.workers.together(FORWARD, lists):
            share_ids(batch, self.communicator)
            return self.inner.forward(batch)

    def head_rows(self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"] | slice) -> HeadRows:
        """Select rows. The workers have the batch's logits_indices, so only a slice is sent to them."""

        def head(selected: Tensor) -> Tensor:
            with self.workers.together(LOGITS, rows if isinstance(rows, slice) else None):
                return self.model.compute_logits(selected)

        return HeadRows(hidden[rows], head)

    def on_all_ranks(self, function: Callable[..., T], *arguments: object) -> T:
        with self.workers.together(CALL, (function, arguments)):
            return function(self, *arguments)


class LeadingGraphs:
    """The CUDA graphs of rank 0. All ranks capture and free theirs together, and replay them in the same steps."""

    def __init__(self, graphs: Replayer, workers: Workers) -> None:
        self.try_replay, self.prepare = graphs.try_replay, graphs.prepare
        self._graphs, self._workers = graphs, workers

    def capture_next(self) -> bool:
        with self._workers.together(CALL, (capture_next, ())):
            return self._graphs.capture_next()

    def drop_graphs(self) -> None:
        with self._workers.together(CALL, (drop_graphs, ())):
            self._graphs.drop_graphs()


def capture_next(runner: ModelRunner) -> None:
    """Capture the graph of a worker that rank 0 captures."""
    if runner.graphs is not None:
        runner.graphs.capture_next()


def drop_graphs(runner: ModelRunner) -> None:
    """Free the graphs of a worker."""
    if runner.graphs is not None:
        runner.graphs.drop_graphs()


@dataclass(eq=False)
class SplitSampling(Route):
    """The route by which all ranks sample together, each from the logits of its ids (split_sampling.py)."""

    head: VocabularyHead
    workers: Workers

    def try_sample(self, rows: HeadRows, batch: SamplingBatch) -> Int[Tensor, " num_rows"] | None:
        if not rows.is_raw:
            return None
        few = SamplingBatch(**batch.of_params, u=batch.u)
        with self.workers.together(SAMPLE, few):
            return split_sampling.sample(rows.hidden, few, self.head)


def reads_at_once(device: torch.device) -> bool:
    """Whether the host reads a tensor of the device without waiting for it: on a CPU."""
    return device.type == "cpu"


def share_ids(batch: ForwardBatch, communicator: Communicator) -> None:
    """Overwrite the batch's ids by those of rank 0, which has drawn some of them, unless the lists that it sent have them."""
    if not reads_at_once(batch.input_ids.device):
        communicator.broadcast(batch.input_ids)


@torch.inference_mode()
def serve(connection: Connection, runner: ModelRunner, device: torch.device, communicator: Communicator) -> None:
    """Make rank 0's calls on a worker. Raises: EOFError when rank 0 closes the connection."""
    model: Any = runner.model
    batch: Any = None
    hidden = torch.empty(0)
    while True:
        command, argument = unpack(connection.recv_bytes(), device)
        if command == FORWARD:
            batch = ForwardBatch.of(BatchLists(*argument), device)
            share_ids(batch, communicator)
            hidden = runner.forward(batch)
        elif command == LOGITS:
            model.compute_logits(hidden[batch.logits_indices if argument is None else argument])
        elif command == SAMPLE:
            split_sampling.sample(hidden[batch.logits_indices], argument, model.lm_head)
        elif command == CALL:
            function, arguments = argument
            function(runner, *arguments)


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays, because multiprocessing would share their memory between the processes."""

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return None
        bits = value.view(torch.int16) if value.dtype is torch.bfloat16 else value  # a dtype that numpy does not know
        return value.dtype, bits.cpu().numpy()


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(packed))
        self._device = device

    def persistent_load(self, packed: Any) -> Tensor:
        dtype, array = packed
        return on_device(torch.from_numpy(array), self._device).view(dtype)


def pack(message: object) -> bytes:
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()


def unpack(packed: bytes, device: torch.device) -> Any:
    """Return the message of pack(), with its tensors on this rank's device."""
    return _Unpacker(packed, device).load()
