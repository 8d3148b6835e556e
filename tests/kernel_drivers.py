"""The drivers of the C++ kernels (tests/kernels/driver.h): how each is compiled, what it prints, and the instructions it takes.

python -m tests.kernel_drivers       # renew tests/counts/kernel_instructions.json
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from tests.helpers import precompiled, recorded_counts

PACKAGE, FOLDER = native.HEADERS.parents[1], Path(__file__).parent / "kernels"

# A report ends the driver. These keep the places of a report readable, and compile in half the time of -O3.
SANITIZED = ("-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADED = ("-O1", "-g1", "-fsanitize=thread", "-fno-builtin-memcpy")  # the sanitizer sees no inlined memcpy
GUARDED = ("-DGUARD_PAGES",)  # -O3, as the kernels are used
ONE_TARGET = ("-march=x86-64-v3",)  # instructions that valgrind knows, the same ones on every machine


@dataclass(frozen=True)
class Driver:
    """A kernel's source in the package, the driver in tests/kernels, and what the preprocessor gets.

    Attributes:
        counted_rows: the numbers of rows for which the instructions are counted.
    """

    source: str
    driver: str
    definitions: tuple[str, ...] = ("BF16",)
    counted_rows: tuple[int, ...] = ()


def _decode(head_dim: int, group: int, *definitions: str) -> Driver:
    return Driver("fast/cpu/paged_decode.cpp", "paged_decode", (f"HEAD_DIM={head_dim}", f"GROUP={group}", *definitions), (1,))


def _prefill(head_dim: int, *definitions: str) -> Driver:
    return Driver("fast/cpu/paged_prefill.cpp", "paged_prefill", (f"HEAD_DIM={head_dim}", *definitions), (32,))


def _delta(key_dim: int, value_dim: int, group: int, num_tokens: int, *definitions: str) -> Driver:
    sizes = f"KEY_DIM={key_dim}", f"VALUE_DIM={value_dim}", f"GROUP={group}", f"KERNEL={num_tokens}"
    return Driver("fast/cpu/delta.cpp", "delta", (*sizes, *definitions), (1,))


EMULATED = ("BF16", "TILES", f'EMULATE_TILES="{FOLDER / "emulated_tiles.h"}"')

DRIVERS = {
    "dense_linear": Driver("fast/cpu/dense_linear.cpp", "linear", counted_rows=(1, 16)),
    "tile_linear": Driver("fast/cpu/tile_linear.cpp", "linear", EMULATED),
    "quantized_linear": Driver("fast/cpu/quantized_linear.cpp", "linear", ("BF16", "QUANTIZED"), (1, 16)),
    "rounding": Driver("fast/cpu/rounding.cpp", "rounding", ()),
    "screen": Driver("fast/cpu/screen.cpp", "screen", counted_rows=(1,)),
    "layers": Driver("fast/cpu/layers.cpp", "layers", counted_rows=(1,)),
    "paged_decode": _decode(40, 3, "BF16"),
    "paged_prefill": _prefill(40, "BF16"),
    "delta": _delta(20, 24, 2, 4, "BF16"),
    "program": Driver("fast/cpu/vectors.h", "program", ("BF16", "LANES=16"), (1,)),
    "sampling": Driver("fast/sampling/kernels.cpp", "sampling", counted_rows=(1,)),
    "exchange": Driver("features/distributed/exchange.cpp", "exchange", (), (9,)),
}

_DTYPES = {"float32": (), "bfloat16": ("BF16",), "float16": ("FP16",)}

# What takes minutes together.
MORE_DRIVERS = {
    **{f"dense_linear {dtype}": Driver("fast/cpu/dense_linear.cpp", "linear", given) for dtype, given in _DTYPES.items()},
    **{f"screen {dtype}": Driver("fast/cpu/screen.cpp", "screen", given) for dtype, given in _DTYPES.items()},
    **{f"layers {dtype}": Driver("fast/cpu/layers.cpp", "layers", given) for dtype, given in _DTYPES.items()},
    **{f"sampling {dtype}": Driver("fast/sampling/kernels.cpp", "sampling", given) for dtype, given in _DTYPES.items()},
    "tile_linear": DRIVERS["tile_linear"],
    **{
        f"quantized_linear {dtype}": Driver("fast/cpu/quantized_linear.cpp", "linear", ("QUANTIZED", *given))
        for dtype, given in _DTYPES.items()
    },
    "quantized_linear in tiles": Driver("fast/cpu/quantized_linear.cpp", "linear", ("QUANTIZED", *EMULATED)),
    "paged_decode 16": _decode(16, 1),
    "paged_decode 33": _decode(33, 2, "BF16"),
    "paged_decode 64": _decode(64, 3, "FP16"),
    "paged_decode 80 int8": _decode(80, 4, "BF16", "INT8_PAGES"),
    "paged_decode 128": _decode(128, 8, "BF16"),
    "paged_decode 256 int8": _decode(256, 2, "INT8_PAGES"),
    "paged_prefill 16": _prefill(16),
    "paged_prefill 33": _prefill(33, "BF16"),
    "paged_prefill 64": _prefill(64, "FP16"),
    "paged_prefill 64 in tiles": _prefill(64, *EMULATED),
    "paged_prefill 80 int8": _prefill(80, "BF16", "INT8_PAGES"),
    "paged_prefill 128": _prefill(128, "BF16"),
    "paged_prefill 256": _prefill(256, "BF16"),
    "delta 16": _delta(16, 16, 1, 2),
    "delta 33": _delta(33, 17, 3, 5, "FP16"),
    "delta 128": _delta(128, 128, 2, 4, "BF16"),
    "program": DRIVERS["program"],
    "exchange": DRIVERS["exchange"],
}


class BuildError(Exception):
    """The compiler failed. The message is the compiler's."""


def build(driver: Driver, *options: str, package: Path = PACKAGE, compiler: str | None = None) -> Path:
    """Compile a driver, unless an equal one is kept (helpers/precompiled.py).

    Args:
        options: of the compiler, after those that kernels are compiled with.
        package: the folder of the package, or a copy of it.
        compiler: the compiler, whose target the options name. None: the one that compiles the kernels, for this processor.
    """
    source, headers = package / driver.source, package / "fast/cpu"
    command = [compiler, *native.OPTIONS] if compiler else [*native.find_compiler().command]
    command[1:1] = ["-I", str(headers)]
    command += options
    command += [f"-D{definition}" for definition in ("STREAMED=3", f'SOURCE="{source}"', *driver.definitions)]
    command.append(str(FOLDER / f"{driver.driver}.cpp"))
    parts = {source, headers / "program.cpp", *headers.glob("*.h"), *FOLDER.glob("*.h"), FOLDER / f"{driver.driver}.cpp"}
    texts = [path.read_text(encoding="utf-8") for path in sorted(parts)]
    key = hashlib.sha256("\0".join([*command, *texts, version_of(command[0]), native.processor()]).encode()).hexdigest()[:16]
    program = (precompiled.made_folder() if package == PACKAGE else package) / "drivers" / f"{driver.driver}-{key}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as temporary:
            built = Path(temporary, "driver")
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise BuildError(done.stderr)
            os.replace(built, program)
    return program


@cache
def version_of(compiler: str) -> str:
    """The first line that a compiler prints of itself."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a driver, or a command before it. What a sanitizer reports is in stderr."""
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [str(program), *arguments], env=os.environ | options, capture_output=True, text=True, errors="replace"
    )


def digests_of(output: str) -> dict[str, set[str]]:
    """The digests that a driver has printed for each case: one, if a case does not depend on the number of threads."""
    digests = defaultdict(set)
    for line in output.splitlines():
        case, _, digest = line.rpartition(" | ")
        digests[case.rpartition(" | ")[0]].add(digest)
    digests.pop("", None)  # other lines
    return dict(digests)


def can_build(*options: str, compiler: str | None = None) -> bool:
    """Whether the compiler, by default the one of the kernels, knows the options, and what they link."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }")
        try:
            command = [compiler, "-pthread"] if compiler else [*native.find_compiler().command]
            command += [*options, str(source), "-o", str(source.with_suffix(""))]
        except UnsupportedError:
            return False
        if subprocess.run(command, capture_output=True).returncode:
            return False
        return run(source.with_suffix("")).returncode == 0


def circumstances() -> dict[str, str]:
    """What the numbers of instructions depend on, beside the sources."""
    version = version_of(native.find_compiler().command[0])
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True).stdout.strip()
    return {"compiler": version, "library": libc or "", "counter": valgrind}


def why_not_counted() -> str | None:
    """Why instructions cannot be counted here and compared with the record, or None."""
    if shutil.which("valgrind") is None:
        return "there is no valgrind"
    if not can_build(*GUARDED, *ONE_TARGET):
        return "the compiler does not compile for x86-64-v3, or the processor does not run it"
    recorded, here = recorded_counts.read("kernel_instructions")[0], circumstances()
    return None if recorded == here else f"the record is of {recorded}, and here is {here}"


def count_instructions(name: str) -> dict[str, int]:
    """Count the instructions of each function of a kernel, with those that it calls."""
    driver = DRIVERS[name]
    program = build(driver, *GUARDED, *ONE_TARGET)
    functions = re.findall(r'extern "C" \w+ (\w+)\(', (PACKAGE / driver.source).read_text(encoding="utf-8"))
    if name == "program":
        functions = ["run"]
    counts = {}
    for rows in driver.counted_rows:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "callgrind.out")
            # Bound at once: looking up a function of a library takes instructions at its first call.
            command = ["LD_BIND_NOW=1", "valgrind", "--tool=callgrind", "--compress-strings=no", f"--callgrind-out-file={out}"]
            done = run(Path("env"), *command, str(program), "count", str(rows))
            assert done.returncode == 0, done.stderr
            inclusive = _inclusive_instructions(out.read_text())
        counts |= {f"{name}, {rows} rows: {function}": inclusive[function] for function in functions if function in inclusive}
    return counts


def _inclusive_instructions(text: str) -> dict[str, int]:
    """The instructions of each function that another has called, from callgrind's file. "calls=" is the line before them."""
    inclusive: dict[str, int] = defaultdict(int)
    callee = ""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("cfn="):
            callee = line.removeprefix("cfn=")
        elif line.startswith("calls="):
            inclusive[callee] += int(next(lines).split()[1])
    return inclusive


if __name__ == "__main__":
    everything = {key: count for name in DRIVERS for key, count in count_instructions(name).items()}
    recorded_counts.write("kernel_instructions", circumstances(), everything)
