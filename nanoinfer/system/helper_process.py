"""A second Python process for work that may crash or never end, because a process can be stopped, unlike a thread.

In: a request. Out: the reply, or None if the request takes too long or crashes. Requests and replies are lines of JSON. The
process is started at the first request, and again after it has ended. A request during which it ended is tried again.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from threading import Lock, Timer
from typing import Any

from nanoinfer.errors import HelperProcessError, QueueFullError, starting_threads

MAX_ATTEMPTS = 2
MAX_START_SECONDS = 120.0

# The signals by which a request ends its process: the time limit, or an error in a library. Windows lacks most.
_LIMIT = signal.Signals.__members__.get("SIGPROF")
_CRASHES = {signal.Signals.__members__.get(name) for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")}


class HelperProcess:
    """Runs `python -m module`, which calls serve(). It may be used by any thread. subject: what it works on, for messages.

    max_wait: the seconds that a request may wait for others, once the process has started. max_seconds: those after which a
        silent process is killed.
    """

    def __init__(self, module: str, subject: str, *, max_wait: float, max_seconds: float) -> None:
        self._module, self._subject = module, subject
        self._max_wait, self._max_seconds = max_wait, max_seconds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_starting = False
        self._owner = 0  # the id of the process that started it, because each fork starts its own

    def ask(self, request: str) -> Any:
        """Return the reply to a request in JSON, or None if the request takes too long, or crashes at every attempt.

        Raises:
            QueueFullError: the requests of others took longer than max_wait.
            HelperProcessError: the process did not start, or was killed, at every attempt.
        """
        while not self._lock.acquire(timeout=self._max_wait):
            if not self._is_starting:  # which takes longer than requests do, and is no sign of too many
                raise QueueFullError(f"too many {self._subject} wait already; try again later")
        ended_by: int | None = None
        try:
            for _ in range(MAX_ATTEMPTS):
                if (process := self._running() or self._start()) is None:
                    continue
                if line := _read_line(process, self._max_seconds, request.encode() + b"\n"):
                    return json.loads(line)
                self.close()
                if (ended_by := -process.returncode) == _LIMIT:
                    return None
        except BaseException:  # such as Ctrl-C: otherwise the next request would read this request's reply
            self.close()
            raise
        finally:
            self._lock.release()
        if ended_by in _CRASHES:
            return None
        raise HelperProcessError(
            f"the process for {self._subject} did not start, or was killed, {MAX_ATTEMPTS} times; try again later, and if it "
            f"never starts, `{sys.executable} -m {self._module}` shows why"
        )

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()  # closes the pipes
        self._process = None

    def _running(self) -> "subprocess.Popen[bytes] | None":
        """Return the process if it still runs. It may have been killed since the last request."""
        if self._process is not None and (self._owner != os.getpid() or self._process.poll() is not None):
            self.close()
        return self._process

    def _start(self) -> "subprocess.Popen[bytes] | None":
        """Start the process with this process's module path. Returns None if it does not become ready."""
        if not self._owner:  # the first start
            atexit.register(self.close)
        self._owner, self._is_starting = os.getpid(), True
        try:
            self._process = start_python("-W", "ignore", "-m", self._module, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if _read_line(self._process, MAX_START_SECONDS) != b"ready\n":
                self.close()
        except OSError:
            self.close()
        finally:
            self._is_starting = False
        return self._process


def start_python(*arguments: object, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a second interpreter, which finds the same modules. Its standard input closes when this process ends.

    options: those of subprocess.Popen.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", *map(str, arguments)],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, "TQDM_DISABLE": "1"},
        start_new_session=True,  # Ctrl-C is for this process only
        **options,
    )


def _read_line(process: "subprocess.Popen[bytes]", max_seconds: float, request: bytes = b"") -> bytes:
    """Write a request, and read a line. Returns b"" if the process ends, and kills it if it takes too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = Timer(max_seconds, process.kill)
    with starting_threads():
        timer.start()
    try:
        process.stdin.write(request)
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        return b""
    finally:
        timer.cancel()
    return line if line.endswith(b"\n") else b""


def serve(prepare: Callable[[], Callable[[bytes], object]], *, max_seconds: float, max_bytes: int) -> None:
    """Answer requests in the second process until the pipe is closed.

    Args:
        prepare: imports what is needed, and returns the function that turns a JSON request into the reply.
        max_seconds: the limit of a request in processor seconds, so that a busy machine ends none. A request that takes
            longer ends the process.
        max_bytes: the limit, on Linux only, of memory beyond that of the process before its first request.
    """
    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # so that a library's output is not taken for a reply
    answer = prepare()
    _limit_memory(max_bytes)
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        _limit_time(max_seconds)
        reply = answer(line)
        _limit_time(0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _limit_time(max_seconds: float) -> None:
    """End the process after these seconds. The signal has no handler, so no library can prevent it. 0: no limit."""
    if _LIMIT is not None:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)


def _limit_memory(max_bytes: int) -> None:
    """Lower the limit of address space, unless it is lower already (`ulimit -v`, a cluster's)."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        lowest = min(limit for limit in (taken + max_bytes, soft, hard) if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
