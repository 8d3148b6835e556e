"""Compile the C++ kernels of this package for this machine when they are first used, and keep the libraries.

In: a .cpp file that includes no headers of torch, and the sizes to compile in. It may include .h files of its folder and of
this folder. Out: a library to call by ctypes. The compiler is $CXX, or else g++, clang++ or c++. Libraries are kept in the
folder "kernels" of $NANOINFER_CACHE, or of the user's cache folder (~/.cache/nanoinfer), which can be deleted at any time. If
it cannot be written, or others can write there too, every process compiles. Without a compiler, the libraries of the package
are loaded, if `make wheel` has built it and they have these sizes, and otherwise the engine runs the plain definitions.

A library that is cut ends the process that loads it, so the file's name has a digest of its content, which is checked before.
Several processes may compile the same kernel at once. Each moves its complete library to its place.
"""

import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from nanoinfer.errors import InvalidValueError, UnsupportedError, first_line
from nanoinfer.system.disk_cache import opened, private_folder
from nanoinfer.system.environment import processor

logger = logging.getLogger(__name__)

HEADERS = Path(__file__).parent
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-fPIC", "-Wno-psabi", "-I", str(HEADERS))
PATTERN = "*-" + "[0-9a-f]" * 16 + ".so"  # of the names of libraries that are kept
LIBRARIES = HEADERS / "libraries"  # of a wheel (tools/libraries.py): a folder for each of LEVELS
TARGETS = ("-march=native",), ("-mcpu=native",), ()  # the first that the compiler accepts, unless CXX names another
CHANGING_BITS = re.compile(  # options in CXX that are refused (vectors.h)
    "-Ofast|-f(fast|finite|unsafe|reciprocal|associative)-math.*|-fno-signed-zeros|-f(fp-contract=(?!off$)|fp-model=fast).*"
)

_DEFINITIONS: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("BF16",), torch.float16: ("FP16",)}


def definitions_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the preprocessor's definitions for a dtype (vectors.h).

    Raises:
        UnsupportedError: the dtype is not float32, bfloat16 or float16.
    """
    if dtype not in _DEFINITIONS:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(f"C++ kernels support float32, bfloat16 and float16, not {name}")
    return _DEFINITIONS[dtype]


@cache
def load(source: Path, *definitions: str, structures: tuple[type[ctypes.Structure], ...] = ()) -> ctypes.CDLL:
    """Load a kernel's library, and compile it first if it is not in the cache.

    Args:
        source: the .cpp file.
        definitions: definitions for the preprocessor, such as "HEAD_DIM=64".
        structures: the arguments of its functions, whose sizes must equal those in the library.

    Raises:
        UnsupportedError: the compiler failed, or there is neither a compiler nor such a library in the package. The message
            gives the reason.
    """
    library = _load(source, *definitions)
    for structure in structures:
        size = ctypes.c_int64.in_dll(library, f"sizeof_{structure.__name__}").value
        assert size == ctypes.sizeof(structure), f"{structure.__name__} has {size} bytes in {source.name}"
    return library


def _load(source: Path, *definitions: str) -> ctypes.CDLL:
    target = find_target()
    if isinstance(target, Level):
        if (found := _intact(LIBRARIES / target.name, target.name_of(source, *definitions))) is not None:
            return found
        sizes = " ".join(definitions) or "no definitions"
        raise UnsupportedError(
            f"there is no C++ compiler, and the package has no {source.name} with {sizes} for {target.name}; "
            "install g++ or clang++"
        )
    command = [*target.command, *(f"-D{definition}" for definition in definitions)]
    name = _name(source, *command, target.macros, processor())
    if (found := _kept(name)) is not None:
        return found
    _log(logging.INFO, "compiling kernels for this processor, once (some seconds)")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            library = Path(temporary, name)
            _run([*command, "-shared", str(source), "-o", str(library)])
            _keep(library)
            return _kept(name) or ctypes.CDLL(str(library))
    except OSError as error:
        raise UnsupportedError(f"{source.name} cannot be compiled and loaded: {first_line(error)}") from error


def _folder() -> Path:
    return private_folder(cache_folder() / "kernels", "NANOINFER_CACHE/kernels")


def _kept(name: str) -> ctypes.CDLL | None:
    with suppress(InvalidValueError):
        return _intact(_folder(), name)
    return None


def _intact(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load the library of a name, or return None if there is none, or if it is corrupted."""
    for path in folder.glob(f"{name}-*.so"):
        with suppress(OSError), opened(path) as file:
            if path.name == file_name(name, file.read()):
                return ctypes.CDLL(str(path))
    return None


def file_name(name: str, content: bytes) -> str:
    """Return the name of a library's file, which has a digest of its content."""
    return f"{name}-{_digest(content)}.so"


def _keep(library: Path) -> None:
    """Copy a library into the folder. If that fails, it is logged."""
    try:
        folder = _folder()
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            os.replace(shutil.copy(library, temporary), folder / file_name(library.name, library.read_bytes()))
    except (OSError, InvalidValueError) as error:
        _log(logging.WARNING, f"every process compiles its kernels, because they cannot be kept: {first_line(error)}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _name(source: Path, *made_with: str) -> str:
    """Return a library's name, which has a digest of its sources and of what they are compiled with, not of their folder."""
    made_with = tuple(part for part in made_with if part != str(HEADERS))
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted({*source.parent.glob("*.h"), *HEADERS.glob("*.h")}))]
    return f"{source.stem}-{_digest(chr(0).join([*made_with, *texts]).encode())}"


@cache
def _log(level: int, text: str) -> None:
    """Log a line once, although a model has several kernels."""
    logger.log(level, "%s", text)


def cache_folder() -> Path:
    """Return the folder for everything that is kept for this machine. It begins with ~ if the user has no home folder."""
    given = os.environ.get("NANOINFER_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanoinfer"))


def streamed() -> str:
    """Return the definition of the prefetch locality for weights that are read once per step.

    0 keeps them out of the outer caches, which gained 5% on an AMD EPYC (Zen 5). On an Intel Xeon with AMX it halved the
    memory's bandwidth, 12 instead of 29 GB/s (2026-11-23), so other processors get 3, an ordinary prefetch.
    """
    return "STREAMED=0" if "AuthenticAMD" in processor() else "STREAMED=3"


class Compiler(NamedTuple):
    """A C++ compiler that works."""

    command: tuple[str, ...]  # its path, and the options that every kernel is compiled with
    macros: str  # what it predefines with these options, such as its version and the instructions of the processor
    origin: str = "compiled on this machine"  # where its kernels come from, for a report


class Level(NamedTuple):
    """Instructions that a wheel's libraries are compiled for."""

    name: str
    options: tuple[str, ...]  # those of the compiler that choose them
    features: tuple[str, ...]  # what the processor must have, in the words of /proc/cpuinfo

    @property
    def origin(self) -> str:
        return f"of the package, for {self.name}"

    def name_of(self, source: Path, *definitions: str) -> str:
        """Return the name of a library. Those of other sources, options or definitions have another name."""
        return _name(source, *OPTIONS, *self.options, *sorted(definitions))


_V3 = "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"
_V4 = "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"
LEVELS = (  # the best first
    Level("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _V3 + _V4),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


def find_target() -> Compiler | Level:
    """Return what the kernels come from: the compiler, or without one the best level of the package that this processor has.

    A compiler goes first, because it knows all instructions of this processor.

    Raises:
        UnsupportedError: there is neither. The message is that of find_compiler.
    """
    try:
        return find_compiler()
    except UnsupportedError:
        found = re.search(r"^flags\s*:(.*)$", processor(), re.MULTILINE)
        features = set(found[1].split() if found else ())
        for level in LEVELS:
            if features.issuperset(level.features) and (LIBRARIES / level.name).is_dir():
                return level
        raise


def find_compiler() -> Compiler:
    """Return the compiler of $CXX, whose options replace ours, or else the first of g++, clang++ and c++ that works.

    Raises:
        UnsupportedError: there is none. The message lists what was tried.
    """
    try:
        given, tried = shlex.split(os.environ.get("CXX", "")), []
    except ValueError as error:
        raise UnsupportedError(
            f"CXX must be a compiler and its options, as in a shell, got {os.environ['CXX']!r}: {error}"
        ) from error
    if option := next(filter(CHANGING_BITS.fullmatch, given[1:]), None):
        raise UnsupportedError(f"{option} in CXX changes the bits of results, which are those of all machines; leave it out")
    for name, *options in [given] if given else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(name)
        if path is None:
            tried.append(f"there is no {name}")
            continue
        try:
            return _examine(path, *options)
        except UnsupportedError as error:
            tried.append(f"{name}: {error}")
    raise UnsupportedError(f"no C++ compiler works ({'; '.join(tried)}); install g++ or clang++, or name one in CXX")


@cache
def _examine(path: str, *given: str) -> Compiler:
    """Let a compiler print its macros. It needs its headers for that, which some installations lack."""
    names_target = any(option.startswith(("-march=", "-mcpu=")) for option in given)
    for target in ((),) if names_target else TARGETS:
        # The last option of a kind counts. The given words stay first, too: a compiler may be among them, as in "ccache g++".
        options = (path, *given, *OPTIONS, *target, *(option for option in given if option.startswith(("-m", "-O", "-std="))))
        try:
            return Compiler(options, _run([*options, "-E", "-dM", "-include", "cstdint", "-x", "c++", os.devnull]))
        except UnsupportedError as error:
            reason = error
    raise reason


def _run(command: Sequence[str]) -> str:
    """Run the compiler and return what it prints. Raises: UnsupportedError with its first error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UnsupportedError(first_line(error)) from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"{command[0]} fails with exit status {done.returncode} and no message"]
        raise UnsupportedError(next((line for line in lines if "error" in line or "cannot find" in line), lines[0]))
    return done.stdout
