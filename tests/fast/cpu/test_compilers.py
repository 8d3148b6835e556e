"""The kernels with any C++ compiler: which is used, with which options, what it warns about, and the bits that it gives."""

import os
import platform
import shutil
import subprocess

import pytest

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from tests.kernel_drivers import DRIVERS, MORE_DRIVERS, PACKAGE, Driver

COMPILERS = ["g++", "clang++", "aarch64-linux-gnu-g++"]
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def installed(name):
    return shutil.which(name) or pytest.skip(f"there is no {name}")


def folder_of_tools(folder):
    """Make a folder for PATH, with the programs that g++ finds there."""
    folder.mkdir()
    for name in ("as", "ld"):
        (folder / name).symlink_to(installed(name))
    return folder


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Make PATH a folder without compilers. Returns a function that adds a script or a link to one."""
    folder = folder_of_tools(tmp_path / "bin")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))

    def add(name, text):
        path = folder / name
        if text.startswith("#!"):
            path.write_text(text)
            path.chmod(0o755)
        else:
            path.symlink_to(text)
        monkeypatch.setenv("PATH", str(folder))
        native.load.cache_clear()
        native._examine.cache_clear()

    yield add
    native.load.cache_clear()
    native._examine.cache_clear()


def refusing(*options):
    """A script of a compiler that refuses options."""
    refusals = "".join(f'[ "$option" = {option} ] && echo "error: no {option}" >&2 && exit 1\n' for option in options)
    return f'#!/bin/sh\nfor option; do\n{refusals}:\ndone\nexec {installed("g++")} "$@"\n'


def warnings_of(compiler, driver, *options):
    found, source = installed(compiler), PACKAGE / driver.source
    if source.suffix == ".h":  # of the driver of programs
        source = native.HEADERS / "program.cpp"
    # g++ 12 warns of its own headers
    target = {"g++": ["-march=native", "-Wno-maybe-uninitialized"], "clang++": ["-march=native"]}.get(compiler, [])
    definitions = [f"-D{definition}" for definition in ("STREAMED=3", *driver.definitions) if "LANES" not in definition]
    command = [found, *native.OPTIONS, *WARNINGS, *target, *definitions, *options, str(source), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, timeout=600).stderr


def drivers_of(compiler):
    """By default, each compiler reads a quarter of the kernels. MORE_DRIVERS have more dtypes."""
    step, first = 4, COMPILERS.index(compiler)
    quick = [*DRIVERS][first::step]
    return [pytest.param(compiler, name, marks=[pytest.mark.long] * (name not in quick)) for name in DRIVERS | MORE_DRIVERS]


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "name"), [pair for compiler in COMPILERS for pair in drivers_of(compiler)])
def test_no_compiler_warns_of_a_kernel(compiler, name):
    assert warnings_of(compiler, (MORE_DRIVERS | DRIVERS)[name], "-fsyntax-only" if name in DRIVERS else "-S") == ""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_warning_would_be_noticed(compiler, tmp_path):
    (tmp_path / "kernel.cpp").write_text("int f() {}")
    assert "-Werror" in warnings_of(compiler, Driver(str(tmp_path / "kernel.cpp"), ""), "-fsyntax-only")


def test_the_first_compiler_that_works_is_used_and_a_message_lists_what_was_tried(only):
    gcc, broken = installed("g++"), "#!/bin/sh\necho 'it is broken: error 7' >&2\nexit 1\n"
    only("g++", broken)
    with pytest.raises(UnsupportedError) as caught:
        native.find_compiler()
    assert str(caught.value) == (
        "no C++ compiler works (g++: it is broken: error 7; there is no clang++; there is no c++); "
        "install g++ or clang++, or name one in CXX"
    )
    only("c++", gcc)
    assert native.find_compiler().command[0].endswith("bin/c++")
    only("clang++", gcc)
    assert native.find_compiler().command[0].endswith("bin/clang++")


def test_the_compiler_in_CXX_is_used_with_its_options_or_none(only, monkeypatch):
    only("g++", installed("g++"))
    only("mine", installed("g++"))
    monkeypatch.setenv("CXX", "mine -DMINE")
    compiler = native.find_compiler()
    assert compiler.command[0].endswith("bin/mine")
    assert "#define MINE 1" in compiler.macros
    monkeypatch.setenv("CXX", "missing")
    with pytest.raises(UnsupportedError, match="there is no missing"):
        native.find_compiler()


@pytest.mark.parametrize(
    ("given", "kept", "ours"),
    [
        ("g++ -march=haswell", "#define __AVX2__ 1", "#define __AVX512F__ 1"),
        ("g++ -mno-avx", "", "#define __AVX__ 1"),
        ("g++ -std=c++20", "#define __cplusplus 202002L", "#define __cplusplus 201703L"),
        ("launcher g++ -O0 -DMINE", "#define MINE 1", "#define __OPTIMIZE__ 1"),  # a program that starts the compiler
    ],
)
def test_an_option_in_CXX_replaces_the_one_of_its_kind(given, kept, ours, only, monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("these are options of x86")
    only("g++", installed("g++"))
    only("launcher", '#!/bin/sh\nexec "$@"\n')
    monkeypatch.setenv("CXX", given)
    macros = native.find_compiler().macros.splitlines()
    assert not kept or kept in macros
    assert ours not in macros


@pytest.mark.parametrize("option", ["-march=x86-64-v3", "-mcpu=generic"])
def test_no_other_processor_is_named_beside_the_one_in_CXX(option, only, monkeypatch):
    """-mcpu=native would win over -march on ARM, where some compilers refuse the name that is tried first."""
    only("g++", "#!/bin/sh\n")
    monkeypatch.setenv("CXX", f"g++ {option}")
    assert {word for word in native.find_compiler().command if word.startswith(("-march", "-mcpu"))} == {option}


@pytest.mark.parametrize("option", ["-ffast-math", "-Ofast", "-ffp-contract=fast", "-funsafe-math-optimizations"])
def test_an_option_in_CXX_that_changes_bits_is_refused(option, only, monkeypatch):
    only("g++", installed("g++"))
    monkeypatch.setenv("CXX", f"g++ {option}")
    with pytest.raises(UnsupportedError, match=f"^{option} in CXX changes the bits of results, .*; leave it out$"):
        native.find_compiler()
    monkeypatch.setenv("CXX", "g++ -ffp-contract=off")
    assert native.find_compiler()


@pytest.mark.parametrize(
    ("refused", "used"), [([], "-march=native"), (["-march=native"], "-mcpu=native"), (["-march=native", "-mcpu=native"], None)]
)
def test_a_compiler_that_does_not_know_this_processor_compiles_for_any(refused, used, only, tmp_path):
    only("g++", refusing(*refused))
    assert [option for option in native.find_compiler().command if option.endswith("=native")] == ([used] if used else [])
    (tmp_path / "add.cpp").write_text('extern "C" int add(int x) { return x + 2; }')
    assert native.load(tmp_path / "add.cpp").add(1) == 3


def test_another_version_of_the_compiler_compiles_again(only, tmp_path):
    (tmp_path / "add.cpp").write_text('extern "C" int add(int x) { return x + 2; }')
    gcc = installed("g++")
    for i, version in enumerate(("7", "7", "8")):
        only("g++", f'#!/bin/sh\nexec {gcc} -DVERSION={version} "$@"\n')
        assert native.load(tmp_path / "add.cpp").add(1) == 3
        assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1 + i // 2
