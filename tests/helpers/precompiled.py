"""The headers that kernels include, compiled once for each set of options. They take half of a compiler's time.

No byte of a library differs. Only g++ looks for such a file beside a header, and it ignores one that was made with other
options. Other programs, such as a test's own script in place of g++, compile the headers as a user's does.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from nanoinfer.fast.cpu import native

GXX = shutil.which("g++")
HEADERS = "algorithm", "cmath", "cstdint", "cstring", "functional", "vector"
TEXT = "".join(f"#include <{name}>\n" for name in HEADERS) + "#ifdef __x86_64__\n#include <immintrin.h>\n#endif\n"
FOLDER = native.cache_folder() / "headers"  # where it is now: a test may change it

_run = native._run


def install() -> None:
    """Libraries that native.py compiles from now on include the headers. Their names do not change."""
    native._run = lambda command: _run(with_headers(command) if "-shared" in command else command)


def with_headers(command: Sequence[str]) -> list[str]:
    """Return the command of a compiler with the headers first, or as it is if it is not that of g++."""
    if command[0] != GXX:
        return [*command]
    others = "-D", "-I", "-o", "-shared"
    options = [option for option in command[1:] if option.startswith("-") and not option.startswith(others)]
    return [*command, "-include", str(_compiled(tuple(options)))]


@cache
def _compiled(options: tuple[str, ...]) -> Path:
    """Return a file that includes the headers. The compiled one is beside it."""
    folder = FOLDER / hashlib.sha256("\0".join(options).encode()).hexdigest()[:16]
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            header = Path(temporary, "made", "headers.h")
            header.parent.mkdir()
            header.write_text(TEXT)
            subprocess.run([str(GXX), *options, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
            with suppress(OSError):  # another process was first
                os.rename(header.parent, folder)
    return folder / "headers.h"


def in_new_cache(path: Path) -> Path:
    """Make a folder a cache of a test's own, which shares the compiled kernels with this process's cache. Returns it."""
    kernels = native.cache_folder() / "kernels"
    for folder in (kernels, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "kernels").symlink_to(kernels.resolve(), target_is_directory=True)
    return path
