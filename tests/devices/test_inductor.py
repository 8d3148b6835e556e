"""A failed compilation says why, and a folder with a space in its name does not keep torch.compile from working."""

import tempfile

import pytest
import torch

from nanoinfer.devices.inductor import compile_options, failure_reason

# The form of torch._inductor.exc.CppCompileError
COMPILER_FAILED = "CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp -L/a b/lib\n\nOutput:\n{}\n\n\nSet TORCH_LOGS"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (COMPILER_FAILED.format("/usr/bin/ld: cannot find -ltorch\ncollect2: error: ld returned 1"), "cannot find -ltorch"),
        (COMPILER_FAILED.format("In file included from x.cpp:1:\ny.h:2: fatal error: no Python.h\n1 |"), "y.h:2: fatal error:"),
        (COMPILER_FAILED.format("Übersetzungsfehler"), "Übersetzungsfehler"),
        ("InvalidCxxCompiler: No working C++ compiler found\n\nSet ...", "InvalidCxxCompiler: No working C++ compiler found"),
        ("\n\nthe reason\nmore", "the reason"),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_is_the_compilers_own_message(message, reason, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    found = failure_reason(RuntimeError(message))
    assert reason in found
    assert "\n" not in found


def test_a_cache_folder_with_a_space_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a b/c")
    assert failure_reason(RuntimeError("failed")).startswith("failed; Inductor cannot compile in '/a b/c': give ")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/temporary files")
    assert "'/temporary files'" in failure_reason(RuntimeError("failed"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of Inductor's own imports
def test_torch_in_a_folder_with_a_space_is_not_linked_with(monkeypatch):
    """The option exists, which torch.compile checks, and the C++ compiler's command has no folder of torch's libraries."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppTorchOptions

    monkeypatch.setattr(torch, "__file__", "/without/a/space/torch/__init__.py")
    assert compile_options() == {}
    monkeypatch.setattr(torch, "__file__", "/my files/torch/__init__.py")
    options = compile_options()
    torch.compile(lambda x: x, options=options)
    assert any("torch" in folder for folder in CppTorchOptions().get_libraries_dirs())
    with config.patch(options):
        assert not any("torch" in folder for folder in CppTorchOptions().get_libraries_dirs())
