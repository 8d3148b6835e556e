"""A second Python process for work that may crash or never end, because a process can be stopped and a thread cannot.

In: a request. Out: the reply, or None if the process took too long or crashed. Requests and replies are lines of JSON. The
process is started at the first request, and again after it has ended.
"""

import atexit
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

from nanoinfer.errors import NanoinferError, QueueFullError


class HelperProcess:
    """Runs `python -m module`, which calls serve(). Any thread may use it.

    Args:
        subject: What the process works on, for messages.
        max_wait: Seconds that a request may wait for others.
    """

    def __init__(self, module: str, subject: str, *, max_wait: float) -> None:
        self._module, self._subject, self._max_wait = module, subject, max_wait
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it, because a fork starts its own
        atexit.register(self.close)

    def ask(self, request: str) -> Any:
        """Return the reply to a request in JSON, or None if there is none. It waits for others for at most max_wait."""
        if not self._lock.acquire(timeout=self._max_wait):
            raise QueueFullError(f"too many {self._subject} wait already; try again later")
        try:
            reply = self._exchange(request.encode() + b"\n")
            if reply is None:
                self.close()
            return reply
        except BaseException:  # such as Ctrl-C, after which the next reply would be to this request
            self.close()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()  # closes the pipes
        self._process = None

    def _exchange(self, request: bytes) -> Any:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = self._start(), os.getpid()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(line) if line else None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process with the modules that this one finds, and wait until it is ready."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        failed = NanoinferError(
            f"the process for {self._subject} did not start; `{sys.executable} -m {self._module}` shows why"
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for this process only
            )
        except OSError as error:
            raise failed from error
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.communicate()
            raise failed
        return process


def serve(prepare: Callable[[], Callable[[bytes], object]], *, max_seconds: float, max_bytes: int) -> None:
    """Answer requests in the second process until the pipe is closed.

    Args:
        prepare: Imports what is needed, and returns the function that turns a request, in JSON, into the reply.
        max_seconds: The limit of a request. One that takes longer ends the process.
        max_bytes: The limit, on Linux only, of memory beyond what the process takes before its first request.
    """
    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # so that what a library prints is not taken for a reply
    answer = prepare()
    _limit_memory(max_bytes)
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        # This ends the process from a thread that does not need the interpreter, so a library's function cannot prevent it.
        faulthandler.dump_traceback_later(max_seconds, exit=True)
        reply = answer(line)
        faulthandler.cancel_dump_traceback_later()
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _limit_memory(max_bytes: int) -> None:
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + max_bytes, resource.RLIM_INFINITY))
