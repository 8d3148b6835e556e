"""A kernel is compiled once per machine, whatever happens to its file, and a failure has the compiler's own message."""

import subprocess
import sys

import pytest

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import native


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A kernel in a folder of its own, and an empty cache."""
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "my cache"))
    native.load.cache_clear()
    native._announce.cache_clear()
    path = tmp_path / "my files" / "add.cpp"
    path.parent.mkdir()
    path.write_text('extern "C" int add(int x) { return x + NUMBER; }')
    return path


def kept(tmp_path):
    return sorted((tmp_path / "my cache").iterdir())


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


def test_a_damaged_library_is_compiled_again(source, tmp_path):
    native.load(source, "NUMBER=2")
    (path,) = kept(tmp_path)
    path.unlink()
    path.write_bytes(b"\x7fELF")
    native.load.cache_clear()
    assert native.load(source, "NUMBER=2").add(1) == 3
    assert len(path.read_bytes()) > 1000


def test_without_a_writable_cache_a_kernel_is_compiled_for_this_process_and_one_warning_says_so(source, tmp_path, caplog):
    (tmp_path / "my cache").write_text("a file")
    assert native.load(source, "NUMBER=2").add(1) == 3
    assert native.load(source, "NUMBER=3").add(1) == 4
    [warning] = caplog.messages
    assert "my cache cannot be written; set NANOINFER_CACHE to a folder that can be written" in warning


def test_it_says_once_that_kernels_are_compiled_and_nothing_when_they_are_kept(source, caplog):
    caplog.set_level("INFO", native.logger.name)
    native.load(source, "NUMBER=2")
    native.load(source, "NUMBER=3")
    assert caplog.messages == ["compiling kernels for this processor, once (some seconds)"]
    native._announce.cache_clear()
    native.load.cache_clear()
    native.load(source, "NUMBER=2")
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_processes_that_compile_the_same_kernel_at_once_all_get_it(source, tmp_path):
    code = "import sys; from pathlib import Path; from nanoinfer.fast.cpu import native; "
    code += "print(native.load(Path(sys.argv[1]), 'NUMBER=2').add(1))"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == [b"3"] * 2
    assert len(kept(tmp_path)) == 1


def test_a_failure_has_the_compilers_message_and_leaves_no_file(source, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"error: .*NUMBER"):
        native.load(source)
    source.write_text('extern "C" int missing(); extern "C" int add() { return missing(); }')
    with pytest.raises(UnsupportedError, match=r"add\.cpp was compiled and cannot be loaded: .*undefined symbol: missing"):
        native.load(source)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UnsupportedError, match=r"works \(false: .*/false fails with exit status 1 and no message\); install"):
        native.load(source)
    monkeypatch.setenv("CXX", "nothing-like-this")
    with pytest.raises(
        UnsupportedError, match=r"works \(there is no nothing-like-this\); install g\+\+ or clang\+\+, or name one in CXX"
    ):
        native.load(source)
    assert kept(tmp_path) == []
