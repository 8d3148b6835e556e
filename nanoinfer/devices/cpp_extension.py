"""C++ files of the package, compiled for this machine's CPU when they are first used.

In: the path of a .cpp file. Out: its library, opened by ctypes, or None without a working C++ compiler. Nothing requires one:
each caller has a form in PyTorch as well.

A file includes no header of torch, so it compiles in seconds and does not depend on torch's version. Its functions are
`extern "C"` and take pointers and numbers. Its OpenMP loops run on torch's threads, because torch has loaded its OpenMP library
for the whole process before.

Libraries are kept in the folder kernels/ beside devices/machine_checks.py's file. The name contains a digest of everything that
decides the code: the source, the command and the processor. Several processes may compile at once: a library appears under its
name only when it is complete. Deleting the folder is safe.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nanoinfer.devices.machine_checks import cache_path, processor
from nanoinfer.errors import first_line

logger = logging.getLogger(__name__)

# No flag that changes results, such as -ffast-math, which would also change how the whole process treats subnormal numbers.
FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared".split()
TIMEOUT = 120  # seconds of one compilation


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """Compile a file, unless its library is kept from an earlier process, and open the library.

    Returns:
        None if there is no C++ compiler or it fails. One log line says why.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), None)
    if compiler is None:
        logger.warning("no C++ compiler (g++ or clang++) found: %s is not used, and its slower PyTorch form runs", source.name)
        return None
    command = [*compiler.split(), *FLAGS]
    digest = hashlib.sha256("\n".join([source.read_text(encoding="utf-8"), *command, processor()]).encode()).hexdigest()[:16]
    library = cache_path().parent / "kernels" / f"{source.stem}-{digest}.so"
    try:
        if not library.exists():
            library = _compile([*command, str(source)], library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", "") or error).splitlines()
        reason = next((line for line in lines if "error" in line), first_line(error))
        logger.warning("%s does not compile (%s): its slower PyTorch form runs", source.name, reason)
        return None


def _compile(command: list[str], library: Path) -> Path:
    """Compile into a temporary folder, then rename. In a read-only home, or on a full disk, the file stays in that folder."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        built = Path(tempfile.mkdtemp(dir=library.parent), library.name)
    except OSError:
        library = built = Path(tempfile.mkdtemp(prefix="nanoinfer-"), library.name)
    try:
        subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, text=True, timeout=TIMEOUT)
        os.replace(built, library)
    finally:
        if built != library:
            shutil.rmtree(built.parent)
    return library
