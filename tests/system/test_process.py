"""Effects on the whole process: applied as documented, logged once, and listed in one docstring."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanoinfer
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.system import process

PACKAGE = Path(nanoinfer.__file__).parent


@pytest.fixture(autouse=True)
def nothing_logged_before(caplog):
    process.log_once.cache_clear()
    caplog.set_level("INFO", logger="nanoinfer")


def allocator(monkeypatch, accepted):
    """A C library whose mallopt notes its calls."""
    calls = []

    def mallopt(parameter, value):
        calls.append((parameter, value))
        return accepted

    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    return calls


@pytest.mark.parametrize(
    ("cpu_max", "given", "num_threads"),
    [("200000 100000", None, 2), ("150000 100000", None, 1), ("50000 100000", None, 1), ("max 100000", None, 3),
     ("900000 100000", None, 3), ("200000 100000", "3", 3), (None, None, 3)],
)  # fmt: skip
def test_torch_uses_no_more_threads_than_the_container_may_use_cpus(monkeypatch, caplog, cpu_max, given, num_threads):
    def read_text(path):
        assert str(path) == "/sys/fs/cgroup/cpu.max"
        if cpu_max is None:
            raise FileNotFoundError
        return cpu_max

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    process.keep_cpu_quota.cache_clear()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        process.keep_cpu_quota()
        assert torch.get_num_threads() == num_threads
        assert ("process-wide: torch computes in" in caplog.text) == (num_threads < 3)
        torch.set_num_threads(4)
        process.keep_cpu_quota()  # the first engine has been made
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_cpu_backend_sets_the_allocators_thresholds_and_logs_it_once(monkeypatch, caplog):
    calls = allocator(monkeypatch, accepted=1)
    for _ in range(2):
        CPUBackend(enforce_eager=True)
    assert calls == [(-3, 2**28), (-1, 2**29)] * 2  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    assert caplog.text.count("process-wide: malloc keeps freed blocks of up to 256 MiB (mallopt)") == 1


def test_thresholds_that_the_allocator_refuses_are_not_logged(monkeypatch, caplog):
    assert allocator(monkeypatch, accepted=0) == []
    process.keep_freed_memory()
    assert caplog.text == ""


@pytest.mark.parametrize("library", [OSError, TypeError, None])
def test_another_allocator_stays_as_it_is(library, monkeypatch, caplog):
    """TypeError: as on Windows, where CDLL(None) is refused. None: a library without mallopt, as musl's and macOS's."""

    def load(name):
        if library is not None:
            raise library
        return SimpleNamespace()

    monkeypatch.setattr(process.ctypes, "CDLL", load)
    process.keep_freed_memory()
    assert caplog.text == ""


def test_the_current_cuda_device_is_set_and_logged(monkeypatch, caplog):
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for index in (1, 1, 0):
        process.set_cuda_device(torch.device("cuda", index))
    assert devices == [torch.device("cuda:1"), torch.device("cuda:1"), torch.device("cuda:0")]
    assert caplog.text.count("process-wide: the current CUDA device is cuda:1") == 1
    assert caplog.text.count("process-wide: the current CUDA device is cuda:0") == 1


# A call that changes the process -> the files that make it, besides those that own their process.
EFFECTS = {
    r"\bmallopt\(": {"system/process.py"},
    r"\bset_device\(": {"system/process.py"},
    r"\bsignal\.signal\(": {"llm.py", "engine/guards.py"},
    r"set_num_threads\(": {"distributed/launch.py", "system/process.py"},
    r"set_num_interop_threads\(|set_default_\w+\(|set_float32_matmul_precision\(|use_deterministic_algorithms\(": set(),
    r"torch\.manual_seed\(|environ\[[^]]*\] = |environ\.(update|setdefault)\(|putenv\(": set(),
    r"basicConfig\(|simplefilter\(|filterwarnings\(|captureWarnings\(|setrecursionlimit\(|\bchdir\(": set(),
}
OWN_THEIR_PROCESS = ("cli/", "bench/", "distributed/worker.py")


@pytest.mark.parametrize("call", EFFECTS)
def test_no_other_file_changes_the_process(call):
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    found = {name for name in files if re.search(call, (PACKAGE / name).read_text(encoding="utf-8"))}
    assert {name for name in found if not name.startswith(OWN_THEIR_PROCESS)} <= EFFECTS[call]


def test_the_docstring_lists_every_effect():
    for words in ("attention/cpu.py", "loading/loader.py", "engine/guards.py", *OWN_THEIR_PROCESS):
        assert words in process.__doc__
