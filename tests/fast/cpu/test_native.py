"""A kernel is compiled once per machine, whatever happens to its file, and a failure has the compiler's own message."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native
from tests.helpers.threads import run_in_threads


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A kernel in a folder of its own, and an empty cache."""
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "my cache"))
    native.load.cache_clear()
    native._log.cache_clear()
    path = tmp_path / "my files" / "add.cpp"
    path.parent.mkdir()
    path.write_text('extern "C" int add(int x) { return x + NUMBER; }')
    return path


def kept(tmp_path):
    return sorted((tmp_path / "my cache" / "kernels").iterdir())


def test_a_kernel_is_compiled_once_for_each_source_and_each_definition(source, tmp_path, monkeypatch):
    assert native.load(source, "NUMBER=2").add(1) == 3
    assert native.load(source, "NUMBER=3").add(1) == 4
    assert len(kept(tmp_path)) == 2
    native.load.cache_clear()
    monkeypatch.setattr(native, "_run", None)
    assert native.load(source, "NUMBER=2").add(1) == 3  # from the file
    monkeypatch.undo()
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "my cache"))
    native.load.cache_clear()
    source.write_text(source.read_text().replace("+", "*"))
    assert native.load(source, "NUMBER=2").add(5) == 10


def test_a_copy_of_the_package_finds_the_same_library_unless_a_header_differs(tmp_path, monkeypatch):
    def name_in(folder):
        monkeypatch.setattr(native, "HEADERS", folder)
        return native._name(folder / "layers.cpp", "g++", "-I", str(folder))

    ours, copied = native.HEADERS, shutil.copytree(native.HEADERS, tmp_path / "copy")
    assert name_in(copied) == name_in(ours)
    (copied / "vectors.h").write_text("// changed")
    assert name_in(copied) != name_in(ours)


@pytest.mark.parametrize(("share", "rest"), [(0, b""), (0.07, b"\0"), (0.5, b""), (0.8, b"\0"), (0.999, b"")])
def test_a_corrupted_library_is_compiled_again(source, tmp_path, share, rest):
    """One that was cut would end the process with SIGBUS or SIGSEGV."""
    native.load(source, "NUMBER=2")
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    start = content[: int(len(content) * share)]
    path.unlink()  # this process has mapped it
    path.write_bytes(start + rest * (len(content) - len(start)))
    native.load.cache_clear()
    assert native.load(source, "NUMBER=2").add(1) == 3
    assert path.read_bytes() == content


@pytest.mark.skipif(sys.platform == "win32", reason="needs the owners and modes of POSIX")
@pytest.mark.parametrize("fault", ["mode", "owner"])
def test_no_library_is_loaded_from_a_folder_that_others_can_write(source, tmp_path, caplog, monkeypatch, fault):
    other = source.with_name("other.cpp")
    other.write_text('extern "C" int add(int x) { return 666; }')
    native.load(source, "NUMBER=2")
    native.load(other)
    mine, injected = kept(tmp_path)
    assert (mine.name[:3], injected.name[:3]) == ("add", "oth")
    name = mine.name.rpartition("-")[0] + injected.name[injected.name.rindex("-") :]
    injected.rename(injected.with_name(name))
    mine.unlink()
    native.load.cache_clear()
    assert native.load(source, "NUMBER=2").add(1) == 666  # the trap works
    native.load.cache_clear()
    if fault == "mode":
        injected.parent.chmod(0o777)
    else:
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert native.load(source, "NUMBER=2").add(1) == 3
    [warning] = caplog.messages
    assert "because they cannot be kept: NANOINFER_CACHE/kernels must be a folder that only you can read and write" in warning


@pytest.mark.parametrize("obstacle", ["a file", "no inode", "no home"])
def test_without_a_cache_a_kernel_is_compiled_for_this_process_and_one_warning_says_so(
    source, tmp_path, caplog, monkeypatch, request, obstacle
):
    if obstacle == "a file":
        (tmp_path / "my cache").write_text("")
    elif obstacle == "no home":
        request.getfixturevalue("no_home")
    else:
        mkdtemp = tempfile.mkdtemp

        def full(suffix=None, prefix=None, dir=None):
            if dir is not None:
                raise OSError(28, "No space left on device", dir)
            return mkdtemp(suffix, prefix)

        monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert native.load(source, "NUMBER=2").add(1) == 3
    assert native.load(source, "NUMBER=3").add(1) == 4
    [warning] = caplog.messages
    assert warning.startswith("every process compiles its kernels, because they cannot be kept: ")
    assert not Path("~").exists()


def test_without_a_temporary_folder_a_kernel_cannot_be_compiled(source, monkeypatch):
    def no_folder(*given, **more):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
    with pytest.raises(UnsupportedError, match=r"add\.cpp cannot be compiled and loaded: .*No usable temporary directory"):
        native.load(source, "NUMBER=2")


def test_it_says_once_that_kernels_are_compiled_and_nothing_when_they_are_kept(source, caplog):
    caplog.set_level("INFO", native.logger.name)
    native.load(source, "NUMBER=2")
    native.load(source, "NUMBER=3")
    assert caplog.messages == ["compiling kernels for this processor, once (some seconds)"]
    native._log.cache_clear()
    native.load.cache_clear()
    native.load(source, "NUMBER=2")
    assert len(caplog.messages) == 1


def test_several_that_compile_the_same_kernel_at_once_all_get_it(source, tmp_path):
    told = []
    run_in_threads(lambda i: told.append(native._load(source, "NUMBER=2").add(1)), num=2)
    assert told == [3] * 2
    assert len(kept(tmp_path)) == 1


def test_a_failure_has_the_compilers_message_and_leaves_no_file(source, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"error: .*NUMBER"):
        native.load(source)
    assert kept(tmp_path) == []
    source.write_text('extern "C" int missing(); extern "C" int add() { return missing(); }')
    with pytest.raises(UnsupportedError, match=r"add\.cpp cannot be compiled and loaded: .*undefined symbol: missing"):
        native.load(source)
    program = tmp_path / "not-a-program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    for compiler, message in (
        ("false", r"works \(false: .*/false fails with exit status 1 and no message\); install"),
        ("nothing-like-this", r"\(there is no nothing-like-this\); install g\+\+ or clang\+\+, or name one in CXX"),
        ('g++ "', r"CXX must be a compiler .* got 'g\+\+ \"': No closing quotation"),
        (str(program), r"works \(.*not-a-program: .*Exec format error.*\); install"),
    ):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(UnsupportedError, match=message):
            native.load(source)
