"""C++ kernels of this package, compiled for this machine when they are first used.

In: a .cpp file without headers of torch, and the sizes to compile in. It may include vectors.h and the .h files of its folder.
Out: a library to call by ctypes. The compiler is $CXX or g++, and it is called once per machine: the library is kept in the
folder of devices/machine_checks.py. Deleting it is safe.
Where the folder cannot be written, every process compiles. Without a compiler the callers have a form in Python.

Several processes may compile the same kernel at once. Each does so in a folder of its own and moves the library to its place
when it is complete, so that no process loads half a file.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from nanoinfer.devices.machine_checks import cache_path, processor
from nanoinfer.errors import UnsupportedError, first_line

# The library is not linked with OpenMP's. Its symbols are found in the one that torch has loaded, so that both share one team
# of threads.
HEADERS = Path(__file__).parent
COMPILE = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c", "-I", str(HEADERS))


def definitions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """What a dtype defines in the source of a kernel: see vectors.h.

    Raises:
        UnsupportedError: the dtype is neither float32 nor bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(f"C++ kernels support float32 and bfloat16, not {name}")
    return ("BF16",) if dtype == torch.bfloat16 else ()


@cache
def load(source: Path, *definitions: str) -> ctypes.CDLL:
    """Load a kernel. Compile it first, unless the library is kept from an earlier call.

    Args:
        source: the .cpp file.
        definitions: of the preprocessor, such as "HEAD_DIM=64".

    Raises:
        UnsupportedError: there is no C++ compiler, or it failed. The message has the reason.
    """
    command = [*_compiler(), *COMPILE, *(f"-D{definition}" for definition in definitions)]
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted({*source.parent.glob("*.h"), *HEADERS.glob("*.h")}))]
    everything = "\0".join([*command, *texts, processor()])
    name = f"{source.stem}-{hashlib.sha256(everything.encode()).hexdigest()[:16]}.so"
    folder = cache_path().parent
    with suppress(OSError):  # not compiled yet, or damaged
        return ctypes.CDLL(str(folder / name))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder if folder.is_dir() and os.access(folder, os.W_OK) else None) as temporary:
        compiled, library = Path(temporary, "kernel.o"), Path(temporary, name)
        _run([*command, str(source), "-o", str(compiled)])
        _run([*_compiler(), "-shared", str(compiled), "-o", str(library)])
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise UnsupportedError(f"{source.name} was compiled and cannot be loaded: {first_line(error)}") from error
        with suppress(OSError):
            os.replace(library, folder / name)
    return loaded


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise UnsupportedError(f"there is no C++ compiler {command[0]!r}; install g++, or name one in CXX")
    return command


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise UnsupportedError(next((line for line in lines if "error" in line or "cannot find" in line), lines[0]))
