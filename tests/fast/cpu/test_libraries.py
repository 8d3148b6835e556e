"""The compiled kernels of a wheel: who gets them, and that none comes from other sources."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from tools.libraries import compile_library, variants

OLDEST = native.LEVELS[-1]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a library for the oldest level, on such a processor without a compiler. Returns the library's source."""
    source = tmp_path / "add.cpp"
    source.write_text('extern "C" int add(int x) { return x + NUMBER; }')
    monkeypatch.setattr(native, "LIBRARIES", tmp_path / "libraries")
    if not features().issuperset(OLDEST.features):
        pytest.skip(f"this processor has not all of {OLDEST.name}")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    compile_library(native.LIBRARIES, OLDEST, (source, ("NUMBER=2", "OTHER")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native.load.cache_clear()
    yield source
    native.load.cache_clear()


def features():
    return {word for line in native.processor().splitlines() if line.startswith("flags") for word in line.split()}


def test_without_a_compiler_the_library_of_the_package_is_loaded(package):
    assert native.find_target() == OLDEST
    assert native.load(package, "OTHER", "NUMBER=2").add(1) == 3


@pytest.mark.parametrize("changed", ["source", "size", "option", "damage"])
def test_no_library_of_other_sources_sizes_or_options_and_no_corrupted_library_is_loaded(changed, package, monkeypatch):
    if changed == "damage":
        (path,) = native.LIBRARIES.glob("*/*.so")
        path.write_bytes(path.read_bytes()[:-1])
    if changed == "source":
        package.write_text(package.read_text().replace("+", "*"))
    if changed == "option":
        monkeypatch.setattr(native, "LEVELS", [OLDEST._replace(options=(*OLDEST.options, "-O2"))])
    with pytest.raises(UnsupportedError, match=r"has no add\.cpp with .* for x86-64-v3; install g\+\+ or clang\+\+"):
        native.load(package, "NUMBER=3" if changed == "size" else "NUMBER=2", "OTHER")


def test_a_processor_gets_the_best_level_that_it_has_or_none(package, monkeypatch):
    best = native.LEVELS[0]
    (native.LIBRARIES / best.name).mkdir()
    for having, expected in ((best.features, best), (best.features[:-1], OLDEST), (OLDEST.features, OLDEST)):
        monkeypatch.setattr(native, "processor", lambda having=having: f"vendor_id : x\nflags\t\t: {' '.join(having)}\n")
        assert native.find_target() == expected
    monkeypatch.setattr(native, "processor", lambda: "flags : avx\n")
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler works"):
        native.find_target()


CODE = """
from nanoinfer import LLM
from nanoinfer.cli.bits import SAME, compare
from nanoinfer.fast.cpu import native
assert isinstance(native.find_target(), native.Level), native.find_target()
for dtype in ("float32", "bfloat16"):
    assert all(LLM(model, dtype=dtype).batch_independent for model in ("tiny-gpt2", "tiny-qwen3"))
assert set(compare().values()) == {SAME}, compare()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_wheel_runs_where_there_is_no_compiler_with_the_published_bits(tmp_path):
    if not features().issuperset(OLDEST.features):
        pytest.skip(f"this processor has not all of {OLDEST.name}")
    root = native.HEADERS.parents[2]
    checkout = tmp_path / "checkout"
    shutil.copytree(root, checkout, ignore=shutil.ignore_patterns(".*", "build", "dist", "notebooks", "tests", "docs"))
    python = [sys.executable, "-m"]
    environment = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", "PYTHONPATH": str(checkout)}
    subprocess.run([*python, "tools.libraries", "build/libraries"], cwd=checkout, env=environment, check=True)
    subprocess.run([*python, "pip", "wheel", "--no-deps", "-w", str(tmp_path), "."], cwd=checkout, env=environment, check=True)
    (wheel,) = tmp_path.glob("nanoinfer-*-py3-none-manylinux_2_*_x86_64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    assert len(list((tmp_path / "installed").rglob("*.so"))) == len(native.LEVELS) * len(list(variants()))
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "installed"), "NANOINFER_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, env=environment, check=True, timeout=600)
