"""The emulator's command in a process of its own, because tests run where Triton's interpreter is on."""

import os
import subprocess
import sys
from pathlib import Path


def output_of(*arguments: str) -> list[str]:
    """Run `python -m tests.emulated_gpu`, and return the lines that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.emulated_gpu", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
