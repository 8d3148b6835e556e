"""Verdicts about this machine, kept on disk. A promise that depends on the machine is checked once per machine.

In: the name of a check and a function that makes it. Out: its verdict, a string. The key of a verdict contains everything that
may change it: processor, operating system, torch's version and settings, number of threads. The file is machine_checks.json in
$NANOINFER_CACHE, or in the user's cache folder (~/.cache/nanoinfer). Deleting it is safe. Where it cannot be written, checks
run again in every process.

Several processes may use the file at once. A file is never changed in place. It is replaced as a whole, so a reader sees the
old one or the new one. If two processes write at the same time, one verdict may be lost. That check then runs again.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from nanoinfer import __version__

REVISION = 3  # of the checks. A new number invalidates every verdict.
# Prefixes of the variables that torch, oneDNN, MKL and OpenBLAS read to choose kernels. CXX is the C++ compiler.
SETTINGS = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_", "CXX")

Verdicts = dict[str, dict[str, str]]  # machine -> check -> verdict
# The file as it was last parsed, and what identified it then. A replaced file has another inode.
_parsed: tuple[tuple[str, int, int, int], Verdicts] | None = None


def verdict(check: str, measure: Callable[[], str]) -> str:
    """The kept verdict of a check on this machine, or a new one.

    Args:
        check: Name of the check, with everything specific to it (sizes, dtype).
        measure: Runs the check. Called only if no verdict is kept. If it raises, nothing is kept.
    """
    machine = machine_key()
    found = _read().get(machine, {}).get(check)
    if not isinstance(found, str):
        found = measure()
        _write(machine, check, found)
    return found


def verdicts() -> dict[str, str]:
    """All kept verdicts of this machine, by check."""
    return dict(sorted(_read().get(machine_key(), {}).items()))


def machine_key() -> str:
    """A readable name, and a digest of everything that may change a verdict, the number of threads included."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SETTINGS))
    settings += [
        f"threads={torch.get_num_threads()}",
        f"matmul={torch.get_float32_matmul_precision()}",
        f"onednn={torch.backends.mkldnn.is_available()}",
        f"nanoinfer={__version__}, revision={REVISION}",
    ]
    digest = hashlib.sha256("\n".join([processor(), torch.__version__, *settings]).encode()).hexdigest()[:16]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_model_name()}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__} ({digest})"


def cache_path() -> Path:
    folder = os.environ.get("NANOINFER_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanoinfer"
    )
    return Path(folder, "machine_checks.json")


@cache
def processor() -> str:
    """Everything the system reports about its first processor, except values that change over time."""
    parts = [platform.platform(), platform.processor(), str(os.cpu_count())]
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        parts += [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]
        parts += [path.read_text() for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))]
    except OSError:  # not Linux
        pass
    return "\n".join(parts)


def _model_name() -> str:
    for line in processor().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read() -> Verdicts:
    """The file's verdicts. Parsed again only if the file was replaced since the last call. Do not change the result."""
    global _parsed
    path = cache_path()
    try:
        if _parsed is not None and _parsed[0] == _identity(path, path.stat()):
            return _parsed[1]
        with path.open(encoding="utf-8") as file:
            identity = _identity(path, os.fstat(file.fileno()))  # of the file that is read, even if it is replaced meanwhile
            kept = json.load(file)
        verdicts = {machine: checks for machine, checks in kept.items() if isinstance(checks, dict)}
    except (OSError, ValueError, AttributeError):  # no file yet, or a damaged one, which the next verdict replaces
        return {}
    _parsed = identity, verdicts
    return verdicts


def _identity(path: Path, stat: os.stat_result) -> tuple[str, int, int, int]:
    return str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size


def _write(machine: str, check: str, found: str) -> None:
    """Add a verdict to the file as it is now, with the verdicts that other processes have added."""
    kept = _read()
    kept = kept | {machine: kept.get(machine, {}) | {check: found}}
    path, temporary = cache_path(), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            temporary = file.name
            json.dump(kept, file, indent=1)
        os.replace(temporary, path)
        temporary = None
    except OSError:  # a read-only home, or a full disk
        pass
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
