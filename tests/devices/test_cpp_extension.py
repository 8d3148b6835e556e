"""Compiling a C++ file of the package: once per machine, safely beside another process, and never required."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanoinfer.devices import cpp_extension

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))
    cpp_extension.load_library.cache_clear()
    yield tmp_path
    cpp_extension.load_library.cache_clear()


def write(folder, source=SOURCE):
    path = folder / "answer.cpp"
    path.write_text(source)
    return path


def kept():
    return sorted(path.name for path in Path(cpp_extension.cache_path().parent, "kernels").glob("*"))


def test_a_file_is_compiled_once_and_again_after_it_changed(folder, monkeypatch):
    assert cpp_extension.load_library(write(folder)).answer() == 42
    [first] = kept()
    cpp_extension.load_library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(cpp_extension, "_compile", lambda *args: pytest.fail("compiled again"))
        assert cpp_extension.load_library(write(folder)).answer() == 42
    cpp_extension.load_library.cache_clear()
    assert cpp_extension.load_library(write(folder, SOURCE.replace("42", "43"))).answer() == 43
    assert len(kept()) == 2
    assert first in kept()


def test_two_that_compile_at_once_leave_one_library(folder):
    """Two threads, which do what two processes would: both find no library."""
    path = write(folder)
    with ThreadPoolExecutor(2) as pool:
        libraries = list(pool.map(cpp_extension.load_library.__wrapped__, [path] * 2))
    assert [library.answer() for library in libraries] == [42, 42]
    assert len(kept()) == 1


def test_a_file_that_does_not_compile_is_named_with_the_reason_and_leaves_nothing(folder, caplog):
    assert cpp_extension.load_library(write(folder, "int answer( { }")) is None
    assert "answer.cpp does not compile (" in caplog.text
    assert "error: " in caplog.text
    assert kept() == []


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_does_not_work_is_a_warning(folder, compiler, monkeypatch, caplog):
    monkeypatch.setenv("CXX", compiler)
    assert cpp_extension.load_library(write(folder)) is None
    assert "answer.cpp does not compile (" in caplog.text


def test_no_compiler_is_a_warning(folder, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    assert cpp_extension.load_library(write(folder)) is None
    assert "no C++ compiler (g++ or clang++) found: answer.cpp is not used" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_compilation_per_process(folder, monkeypatch):
    (folder / "cache").write_text("a file where the folder would be")
    monkeypatch.setattr(cpp_extension.tempfile, "tempdir", str(folder))
    library = cpp_extension.load_library(write(folder))
    assert isinstance(library, ctypes.CDLL)
    assert library.answer() == 42
