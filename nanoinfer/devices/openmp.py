"""How torch's threads wait for each other on a CPU: spinning on a quiet machine, sleeping beside other busy programs.

`observe()` is called once per step. It changes the speed only. No result depends on it.

A step is hundreds of short parallel loops. Between two of them, GNU OpenMP's threads spin before they sleep, because waking a
thread takes longer than most loops. On a quiet machine spinning is faster: one stream of GPT-2's shape took 1.5 times as long
with sleeping threads (2 cores). Beside a program that uses one of the cores spinning is slower. A spinning thread uses up the
time in which the thread that it waits for could run, and the same stream took 4 times as long. No number of spins is good for
both (BENCHMARKS.md).

So the engine switches. Linux counts how long each thread was ready and had no core, in /proc/self/task/*/schedstat: 1% of the
time on a quiet machine, 2% to 7% beside the event loop of a server with 64 streams and their client, 30% and more beside a busy
program. According to libgomp's manual (GOMP_SPINCOUNT), a process that has more OpenMP threads than processors spins 100 times
only. So the engine starts a thread that runs one parallel loop and then waits. It has an OpenMP team of its own, so the process
has too many threads. When it ends, the others spin again.

The engine switches nothing if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, without libgomp (macOS, Windows), or if torch uses
fewer threads than there are processors.
"""

import logging
import os
import threading
import time
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between two observations
BUSY, QUIET = 0.2, 0.1  # shares of the time that a thread waited for a core
BUSY_OBSERVATIONS = 3  # in a row, before threads sleep: another program that runs for a moment is not worth it
QUIET_OBSERVATIONS = 10  # in a row, before threads spin again
_LOOP = 2**18  # elements of a loop that torch runs in parallel


class WaitPolicy:
    """Switches between spinning and sleeping. One per process, because OpenMP's settings are process-wide."""

    def __init__(self) -> None:
        self.is_supported = _is_supported()
        self._last_observation = time.perf_counter()
        self._delays = thread_delays() if self.is_supported else {}
        self._num_busy = self._num_quiet = 0
        self._release: threading.Event | None = None  # of the thread that makes the others sleep

    @property
    def sleeps(self) -> bool:
        return self._release is not None

    def observe(self) -> None:
        """Measure the delays of threads and switch, if the last observation is at least INTERVAL ago."""
        now = time.perf_counter()
        elapsed = now - self._last_observation
        if not self.is_supported or elapsed < INTERVAL:
            return
        before, self._delays, self._last_observation = self._delays, thread_delays(), now
        share = max((delay - before.get(thread, delay) for thread, delay in self._delays.items()), default=0.0) / elapsed
        self._num_busy = self._num_busy + 1 if share > BUSY else 0
        self._num_quiet = self._num_quiet + 1 if share < QUIET else 0
        if self._num_busy >= BUSY_OBSERVATIONS and not self.sleeps:
            logger.info("process-wide: other programs use the cores, so torch's threads sleep while they wait for each other")
            self._sleep()
        elif self.sleeps and self._num_quiet >= QUIET_OBSERVATIONS:
            logger.info("process-wide: the cores are free again, so torch's threads spin while they wait for each other")
            self.spin()

    def spin(self) -> None:
        if self._release is not None:
            self._release.set()
            self._release = None

    def _sleep(self) -> None:
        self._release = release = threading.Event()

        def have_a_team() -> None:
            torch.zeros(_LOOP).add_(1)
            release.wait()

        threading.Thread(target=have_a_team, name="nanoinfer-openmp-team", daemon=True).start()


def thread_delays() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no core, by thread id."""
    delays = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            delays[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return delays


def _is_supported() -> bool:
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ or not hasattr(os, "sched_getaffinity"):
        return False
    if not 1 < len(os.sched_getaffinity(0)) <= torch.get_num_threads():
        return False
    try:
        return b"libgomp" in Path("/proc/self/maps").read_bytes() and bool(thread_delays())
    except OSError:
        return False


_policy: WaitPolicy | None = None
_lock = threading.Lock()


def observe() -> None:
    """Choose how threads wait. Called once per step of a model on a CPU."""
    global _policy
    if not _lock.acquire(blocking=False):
        return  # another engine's thread is observing
    try:
        if _policy is None:
            _policy = WaitPolicy()
        _policy.observe()
    finally:
        _lock.release()


def describe() -> str:
    """How threads wait, in words, for `nanoinfer doctor`."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        if name in os.environ:
            return f"{name}={os.environ[name]}, set in the environment"
    return "spinning, or sleeping beside busy programs" if _is_supported() else "as OpenMP does by default"
