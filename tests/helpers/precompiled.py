"""What compilers make for the tests, kept for all of a user's runs on this machine: kernels, drivers and headers.

A name has a digest of the sources, the options, the compiler and the processor, so nothing of another version is found. The
headers that kernels include take half of a compiler's time, and are compiled once for each set of options. No byte of a
library differs. Only g++ looks for such a file beside a header, and it ignores one that was made with other options. Other
programs, such as a test's own script in place of g++, compile the headers as a user's does.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from nanoinfer.fast.cpu import native

GXX = shutil.which("g++")
HEADERS = "algorithm", "cmath", "cstdint", "cstring", "functional", "vector"
TEXT = "".join(f"#include <{name}>\n" for name in HEADERS) + "#ifdef __x86_64__\n#include <immintrin.h>\n#endif\n"
MOST_DAYS = 14  # after which a file is removed, and made again when it is needed

_run = native._run


def install() -> None:
    """Use the folder of all runs, and include compiled headers in the libraries of native.py from now on."""
    cache = native.cache_folder()
    if cache.name.startswith("nanoinfer-tests-") and made_folder() != cache:  # a cache of the user's own gets no link
        with suppress(FileExistsError):  # another process of this run was first
            (cache / "kernels").symlink_to(made_folder() / "kernels", target_is_directory=True)
    native._run = lambda command: _run(with_headers(command) if "-shared" in command else command)


@cache
def made_folder() -> Path:
    """Return the folder of all runs, or the cache of this one, if others than the user could write there."""
    if not hasattr(os, "getuid"):
        return native.cache_folder()
    folder = Path(tempfile.gettempdir(), f"nanoinfer-tests-of-{os.getuid()}")
    try:
        for part in (folder, folder / "kernels", folder / "drivers", folder / "headers"):
            part.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
            return native.cache_folder()
    except OSError:
        return native.cache_folder()
    for path in folder.glob("*/*"):
        with suppress(OSError):  # another process was first
            if path.stat().st_mtime < time.time() - MOST_DAYS * 86_400:
                path.unlink() if path.is_file() else shutil.rmtree(path)
    return folder


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
    made_with = *options, native.find_compiler().macros, native.processor()
    folder = made_folder() / "headers" / hashlib.sha256("\0".join(made_with).encode()).hexdigest()[:16]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
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
