"""Every effect of this package on the whole process, and the functions that apply three of them.

Importing a module changes nothing. When an engine is made, it applies these effects, and logs the first three:

    allocator       glibc keeps freed memory until the process ends: `keep_freed_memory`, for attention/cpu.py. A server returns
                    what large requests freed: `return_freed_memory`.
    threads         torch has at most as many as a container's quota of CPUs, unless OMP_NUM_THREADS is set: `limit_threads`. A
                    forked process has one: `prepare_threads`. Ranks divide them (features/distributed/launch.py). The kernels'
                    threads sleep between steps (fast/cpu/program.cpp).
    CUDA device     the model's device becomes the thread's current one: `set_cuda_device`, for loading/loader.py and for ranks.
    Module.__call__ torch.fx replaces nn.Module's for milliseconds, while fast/trace.py traces a model.
    exponentials    a kernel with the same bits replaces those of sampling/exponentials.py (fast/sampling/kernels.py).
    tiles           Linux keeps the process's AMX tiles (`has_tiles` in fast/cpu/program.py).
    SIGINT          a handler defers Ctrl-C to the end of a step, in the main thread (engine/guards.py).

Commands (cli/, nanoinfer_lab/, nanoinfer_course/cli.py) and the ranks above 0 (features/distributed/worker.py) own their
process. A command configures logging, and --threads sets torch's threads. A benchmark of a random model seeds torch. Ranks log
errors only, with rank 0's threads and precision of float32 products. Servers and `nanoinfer batch` (server/run.py) set the
interpreter's switch interval, and exempt what was loaded from garbage collection.
"""

import ctypes
import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

KEPT_BYTES = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # numbers in malloc.h


@cache
def log_once(effect: str) -> None:
    """Log an effect at level INFO, the first time it is applied."""
    logger.info("process-wide: %s", effect)


def keep_freed_memory() -> None:
    """Make glibc (`man mallopt`) keep freed blocks of up to KEPT_BYTES for the next step. Other allocators are not changed.

    Returned memory has to be faulted in again, page by page. With 64 rows of Qwen3-0.6B's shape, whose logits are 39 MB, a
    decode step took 206 ms without this and 181 to 192 ms with it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    if mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) + mallopt(_M_TRIM_THRESHOLD, 2 * KEPT_BYTES):  # each returns 1 if it was accepted
        log_once(f"malloc keeps freed blocks of up to {KEPT_BYTES // 2**20} MiB (mallopt)")


def return_freed_memory() -> None:
    """Make glibc return the memory that large requests have freed to the system. Later steps fault it in again."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def cpu_quota() -> float | None:
    """Return how many CPUs the container may use, on average over a period (cgroup v2). None: it has no quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no container, or its quota is "max"
        return None


def available_cpu_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit (cgroup v2)."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: assume half of the machine's memory, or 8 GiB if that is unknown
        is_unix = os.name == "posix"
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if is_unix else 2**33
    try:
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        file_cache = int(stat["inactive_file"]) + int(stat["active_file"])  # counted as used, but reclaimed on demand
        available = min(available, limit - used + file_cache)
    except (OSError, ValueError, KeyError):  # no container, or its limit is "max"
        pass
    return max(available, 0)


def mapped_file_bytes() -> int:
    """Return the bytes of mapped files that this process has in memory, such as kept weights. They count as available."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssFile"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return 0


num_kernel_threads = 0  # in a forked process, where torch has a single thread. 0: as many as torch


def prepare_threads(*, is_forked: bool) -> None:
    """Limit torch's threads before an engine is made. In a forked process only the kernels have several threads.

    torch's OpenMP would wait there for threads that exist only in the process that made them.
    """
    global num_kernel_threads
    limit_threads()
    if is_forked and torch.get_num_threads() > 1:
        num_kernel_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        log_once(f"torch computes in one thread, because this process was forked, and the kernels in {num_kernel_threads}")


@cache
def limit_threads() -> None:
    """Limit torch, and with it our kernels, to as many threads as the container may use CPUs, and to one thread after a fork.

    More threads would use up the quota early and then all wait for the next period, which is 100 ms long by default.
    """
    if os.name == "posix":
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    quota = cpu_quota()
    if quota is None or "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= (num := max(int(quota), 1)):
        return
    torch.set_num_threads(num)
    log_once(f"torch computes in {num} threads, because the container may use {quota:g} CPUs; set OMP_NUM_THREADS for another")


def set_cuda_device(device: torch.device) -> None:
    """Make a device the current device, on which Triton launches kernels. A device without an index is the current one."""
    if device.index is not None:
        torch.get_device_module(device).set_device(device.index)
    log_once(f"the current CUDA device is {device}")
