"""Run parts one after the other, each in a process with a limit of its own, and with another tree interleaved.

In: parts, a Setup, trees. Out: lines, each as soon as it is known. A part that fails or reaches its limit does not stop the
others, because a kernel that fails makes the GPU unusable for its process alone.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.device.parts import PARTS, Part, Setup
from nanoinfer.errors import NanoinferError

ROOT = Path(__file__).parents[2]
THIS, OTHER = "this", "against"  # the names of trees
# The engine is that of a tree, and what measures it is that of this one.
LAUNCH = """import sys
sys.path[0] = sys.argv[1]
import nanoinfer
sys.path[0] = sys.argv[2]
from benchmarks.device.parts import work
work(*sys.argv[3:])"""

Line = dict[str, Any]


class PartProcess:
    """The process of a part. Each turn computes a result."""

    def __init__(self, part: Part, setup: Setup, tree: Path, environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(tree), str(ROOT), part.name, json.dumps(asdict(setup))],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines = queue.SimpleQueue[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def turn(self, deadline: float) -> Line | None:
        """Return the next result, or None after the last. Raises: queue.Empty at the deadline, NanoinferError if it failed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        if line := self._lines.get(timeout=max(deadline - time.monotonic(), 0.01)):
            return dict[str, Any](json.loads(line))
        if code := self._process.wait():
            self._errors.seek(0)
            raise NanoinferError("\n".join(self._errors.read().splitlines()[-12:]) or f"exit status {code}")
        return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def close(self) -> None:
        """End the process and those that it has started."""
        if sys.platform == "win32":
            self._process.kill()
        else:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        with self._errors, suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass


def run_part(
    part: Part, setup: Setup, trees: dict[str, Path], environment: dict[str, str], limit_s: float, emit: Callable[[Line], None]
) -> None:
    """Run a part with each tree, interleaved, and emit its results and how it ended. trees: name -> folder."""
    start = time.monotonic()
    ended, processes, turns = {"state": "done"}, dict[str, PartProcess](), deque(trees)
    with ExitStack() as stack:
        try:
            while turns:
                name = turns.popleft()
                if name not in processes:  # not earlier, so that its start disturbs no measurement
                    process = PartProcess(part, setup, trees[name], environment)
                    processes[name] = stack.enter_context(closing(process))
                if (result := processes[name].turn(start + limit_s)) is not None:
                    emit({"part": part.name, "tree": name} | result)
                    turns.append(name)
        except queue.Empty:
            ended = {"state": f"stopped at its limit of {limit_s:.0f} s; --parts {part.name} repeats it"}
        except NanoinferError as error:
            ended = {"state": "failed", "text": str(error)}
    emit({"part": part.name} | ended | {"seconds": round(time.monotonic() - start, 1)})


def run_parts(
    names: list[str],
    setup: Setup,
    trees: dict[str, Path],
    environment: dict[str, str],
    seconds: float,
    emit: Callable[[Line], None],
) -> None:
    """Run the named parts. The limit of a part is its share of the time that is left for it and those after it.

    setup: without a device, the parts that need a GPU are not run.
    """
    end, parts = time.monotonic() + seconds, [part for part in PARTS if part.name in names]
    for part in parts:
        if part.needs_gpu and not setup.device:
            emit({"part": part.name, "state": "not run: it needs a CUDA device, and torch sees none; --simulate tries it"})
    parts = [part for part in parts if setup.device or not part.needs_gpu]
    for number, part in enumerate(parts):
        share = part.seconds / sum(later.seconds for later in parts[number:])
        of_part = trees if part.is_compared else {THIS: trees[THIS]}
        run_part(part, setup, of_part, environment, share * (end - time.monotonic()), emit)
