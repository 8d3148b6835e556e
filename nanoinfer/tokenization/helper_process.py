"""A second Python process for work that may never end, or crash: a process can be stopped, a thread cannot.

In: a request. Out: the reply, or None if the process took too long or crashed. Requests and replies are JSON, one line
each. The process is started at the first request, and again after it has ended.
"""

import atexit
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any


class HelperProcess:
    """Runs `python -m module`, which calls serve(). Any thread may use it."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it. A fork starts its own.
        atexit.register(self.close)

    def ask(self, request: object) -> Any:
        """Return the reply, or None if there is none."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process, self._owner = self._start(), os.getpid()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                if line := self._process.stdout.readline():
                    return json.loads(line)
            except BrokenPipeError:
                pass
            except BaseException:  # Ctrl-C: the next reply would be to this request
                self.close()
                raise
            self.close()
            return None

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process with the modules that this one finds."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process only
        )


def serve(answer: Callable[[Any], object], *, max_seconds: float, max_bytes: int) -> None:
    """In the second process: answer requests until the pipe is closed.

    Args:
        answer: Request -> reply.
        max_seconds: A request that takes longer ends the process.
        max_bytes: The address space of the process. It is limited on Linux only.
    """
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    for line in sys.stdin.buffer:
        # A thread that needs no interpreter ends the process, also in the middle of a library's function.
        faulthandler.dump_traceback_later(max_seconds, exit=True)
        reply = answer(json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), flush=True)
