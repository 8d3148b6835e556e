"""Describe this machine and the software, for reports of measurements. `nanoinfer doctor` says more."""

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

import nanoinfer


@cache
def processor() -> str:
    """Return everything that the system reports about its first processor, except values that change over time."""
    facts = [platform.platform(), platform.processor(), str(os.cpu_count())]
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        facts += [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]
    except OSError:  # not Linux
        pass
    return "\n".join(facts)


def cpu_name() -> str:
    named = re.search(r"^(?:model name|Model)\s*: (.+)$", processor(), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """Return the size of a device's memory. Windows does not say it of a CPU: 0."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def machine() -> dict[str, str | int]:
    """Return the processor, the number of its logical cores, the memory, the system and the GPU."""
    num_bytes = memory_bytes(torch.device("cpu"))
    return {
        "CPU": cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory": f"{num_bytes / 2**30:.1f} GiB" if num_bytes else "unknown",
        "system": platform.platform(),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch sees",
    }


def versions() -> dict[str, str]:
    """Return the versions of nanoinfer, Python and torch, and the commit if the package is in a checkout."""
    found = {"nanoinfer": nanoinfer.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    root = Path(nanoinfer.__file__).parents[1]
    if (root / ".git").exists():  # a folder, or a file in a worktree
        try:
            command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
            found["commit"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # there is no git, or it refuses another user's folder
            pass
    return found
