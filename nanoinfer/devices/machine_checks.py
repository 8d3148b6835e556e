"""What has been measured about this machine, kept on disk: a promise that depends on the machine is checked once per machine.

In: the name of a check and a function that makes it. Out: its verdict, a string. A verdict is filed under everything that may
change it: processor, operating system, torch's version and settings, number of threads. The file is machine_checks.json in
$NANOINFER_CACHE, or in the user's cache folder (~/.cache/nanoinfer). Deleting it is safe. Where it cannot be written, checks
run again in every process.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from nanoinfer import __version__

REVISION = 1  # of what the checks do: another one makes them anew
# What torch, oneDNN, MKL and OpenBLAS read from the environment: it chooses which kernels run. CXX: the compiler of Inductor.
SETTINGS = ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_", "CXX")


def verdict(check: str, measure: Callable[[], str]) -> str:
    """The verdict of a check on this machine: as it was found before, or else measured now and kept."""
    machine = machine_key()
    found = _read().get(machine, {}).get(check)
    if not isinstance(found, str):
        found = measure()
        _write(machine, check, found)
    return found


def verdicts() -> dict[str, str]:
    """Everything that has been found on this machine, by check."""
    return dict(sorted(_read().get(machine_key(), {}).items()))


def machine_key() -> str:
    """A readable name, and a digest of all that may change a verdict. It differs between numbers of threads."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SETTINGS))
    settings += [
        f"threads={torch.get_num_threads()}",
        f"matmul={torch.get_float32_matmul_precision()}",
        f"onednn={torch.backends.mkldnn.is_available()}",
        f"nanoinfer={__version__}, revision={REVISION}",
    ]
    digest = hashlib.sha256("\n".join([_processor(), torch.__version__, *settings]).encode()).hexdigest()[:16]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{_model_name()}, {capability}, {torch.get_num_threads()} threads, torch {torch.__version__} ({digest})"


def cache_path() -> Path:
    folder = os.environ.get("NANOINFER_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanoinfer"
    )
    return Path(folder, "machine_checks.json")


@cache
def _processor() -> str:
    """All that the system says of its first processor, less what changes from one moment to the next."""
    parts = [platform.platform(), platform.processor(), str(os.cpu_count())]
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        parts += [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]
        parts += [path.read_text() for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))]
    except OSError:  # not Linux
        pass
    return "\n".join(parts)


def _model_name() -> str:
    for line in _processor().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read() -> dict[str, dict[str, str]]:
    try:
        kept = json.loads(cache_path().read_text(encoding="utf-8"))
        return {machine: checks for machine, checks in kept.items() if isinstance(checks, dict)}
    except (OSError, ValueError, AttributeError):  # none yet, or damaged: it is written anew
        return {}


def _write(machine: str, check: str, found: str) -> None:
    """Into a file of its own first: another process may read at this moment. If two write at once, one verdict is lost."""
    kept = _read()
    kept.setdefault(machine, {})[check] = found
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, path)
    except OSError:  # a read-only home
        pass
