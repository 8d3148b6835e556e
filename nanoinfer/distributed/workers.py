"""The worker team of rank 0: it sends commands to the ranks above 0, and finds out which of them has ended, and why.

In: commands, and an error of rank 0. Out: the error for the user. Commands go through connections of their own instead of
collectives, so that a worker can wait for days and both sides notice at once when the other has ended.
"""

import os
import signal
import subprocess
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait

from nanoinfer.distributed.communicator import RankLostError
from nanoinfer.errors import EngineDeadError, first_line

REPORT_SECONDS = 3.0  # the maximum wait for a worker's last report
EXIT_SECONDS = 5.0  # the time that a worker has to end before it is killed

READY, FAILED, LOST = "ready", "failed", "lost"  # the reports of workers, of which FAILED and LOST come with a text


class Workers:
    """The connections to ranks 1, 2 and so on, and their processes if this process has started them.

    The workers end when this object is garbage collected or this process ends, also if it is killed.
    """

    def __init__(self, connections: list[Connection], processes: list["subprocess.Popen[bytes]"]) -> None:
        self._connections = connections
        self._processes = processes
        self._error: str | None = None
        self._close = weakref.finalize(self, _end, os.getpid(), connections, processes)

    def wait_until_ready(self) -> None:
        """Wait until every worker has started."""
        try:
            for connection in self._connections:
                connection.recv()
        except (EOFError, OSError) as error:
            raise RankLostError("a worker did not start") from error

    @contextmanager
    def together(self, *command: object) -> Iterator[None]:
        """Send a command to the workers. This rank executes the same command inside the context.

        Raises: EngineDeadError if a rank has ended or failed, also in every later call.
        """
        if self._error is not None:
            raise EngineDeadError(self._error)
        with self.watched():
            self.send(command)
            yield

    def send(self, message: object) -> None:
        """Send a message to all workers."""
        try:
            for connection in self._connections:
                connection.send(message)
        except OSError as error:
            raise RankLostError("a worker has ended") from error

    def check(self) -> None:
        """Raise RankLostError if a worker has sent anything, because workers report only that they end."""
        if any(connection.poll() for connection in self._connections):
            raise RankLostError("a worker has ended")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run work of all ranks in this context, and end the workers if it raises, because the ranks are then out of step.

        Raises: EngineDeadError if the cause is on another rank. An error of this rank is raised unchanged.
        """
        try:
            yield
        except RankLostError as error:
            self._error = self._explain(error)
            self._close()
            raise EngineDeadError(self._error) from error
        except BaseException as error:
            self._error = f"rank 0 of {self._size} failed: {first_line(error)}; make a new LLM"
            self._close()
            raise

    @property
    def _size(self) -> int:
        return len(self._connections) + 1

    def _explain(self, error: BaseException) -> str:
        """Find the rank that ended first, because the others lose their connection to it and end as well."""
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
                    return f"rank {pending[ready]} of {self._size} failed: {text}; make a new LLM"
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
        return  # this is a fork, and the workers belong to the process that started them
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
