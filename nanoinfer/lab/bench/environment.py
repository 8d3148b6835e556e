"""Describe this machine and the software, for reports of measurements. `nanoinfer doctor` says more."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import nanoinfer
from nanoinfer.fast.cpu.native import processor


def cpu_name() -> str:
    named = re.search(r"^(?:model name|Model)\s*: (.+)$", processor(), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def machine() -> dict[str, str | int]:
    """Return the processor, the number of its logical cores, the memory, the system and the GPU."""
    is_known = hasattr(os, "sysconf")  # it is not on Windows
    memory = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB" if is_known else "unknown"
    return {
        "CPU": cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory": memory,
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
