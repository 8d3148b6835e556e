"""Compile the kernels of common models for the processors of native.LEVELS, which `make wheel` puts into the wheel.

    python -m tools.libraries FOLDER

Models of other sizes, in float16 or with Intel's tiles have kernels where there is a compiler.
"""

import argparse
import os
import shlex
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

from nanoinfer.fast.cpu import native
from nanoinfer.features.distributed.communicator import EXCHANGE

# head_dim -> query heads that share a KV head
HEADS = {32: (1, 2), 64: (1, 2, 3, 4, 5, 7, 8), 80: (1, 4), 96: (1, 3), 128: (1, 2, 3, 4, 5, 6, 7, 8), 256: (1, 2, 4, 8)}
DELTA = ("KEY_DIM=128", "VALUE_DIM=128", "KERNEL=4")  # of Qwen3.5 and Qwen3-Next
DELTA_GROUPS = 1, 2

Variant = tuple[Path, tuple[str, ...]]  # a source and its definitions


def variants() -> Iterable[Variant]:
    """Yield the libraries of a level."""
    cpu, sampling = native.HEADERS, native.HEADERS.parent / "sampling"
    yield EXCHANGE, ()
    yield cpu / "program.cpp", ()
    yield cpu / "rounding.cpp", ()
    for dtype in ((), ("BF16",)):
        yield cpu / "layers.cpp", dtype
        yield sampling / "kernels.cpp", dtype
        for group in DELTA_GROUPS:
            yield cpu / "delta.cpp", (*DELTA, f"GROUP={group}", *dtype)
        for (head_dim, groups), pages in product(HEADS.items(), ((), ("INT8_PAGES",))):
            head = f"HEAD_DIM={head_dim}", *pages, *dtype
            yield cpu / "paged_prefill.cpp", head
            for group in groups:
                yield cpu / "paged_decode.cpp", (f"GROUP={group}", *head)
    for streamed in ("STREAMED=0", "STREAMED=3"):
        yield cpu / "dense_linear.cpp", (streamed,)
        yield cpu / "dense_linear.cpp", (streamed, "BF16")
        yield cpu / "screen.cpp", (streamed,)
        yield cpu / "screen.cpp", (streamed, "BF16")
        yield cpu / "quantized_linear.cpp", (streamed,)
        yield cpu / "quantized_linear.cpp", (streamed, "BF16")


def compile_library(folder: Path, level: native.Level, variant: Variant) -> None:
    """Compile a library for a level, by $CXX or g++, to its place in a folder that takes the place of native.LIBRARIES."""
    source, definitions = variant
    out = folder / level.name / level.name_of(source, *definitions)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [*shlex.split(os.environ.get("CXX") or "g++"), *native.OPTIONS, *level.options, "-s", "-shared"]
    subprocess.run([*command, *(f"-D{definition}" for definition in definitions), str(source), "-o", str(out)], check=True)
    out.rename(out.with_name(native.file_name(out.name, out.read_bytes())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for level in native.LEVELS:
            list(pool.map(partial(compile_library, given.folder, level), variants()))
