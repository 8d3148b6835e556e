"""Effects on the whole process: applied as documented, logged once, and none of an import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.system import process


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
    [
        ("200000 100000", None, 2),
        ("150000 100000", None, 1),
        ("50000 100000", None, 1),
        ("900000 100000", None, 3),
        ("max 100000", None, 3),
        ("200000 100000", "3", 3),
        (None, None, 3),
    ],
)
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
    process.limit_threads.cache_clear()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        process.limit_threads()
        assert torch.get_num_threads() == num_threads
        assert ("process-wide: torch computes in" in caplog.text) == (num_threads < 3)
        torch.set_num_threads(4)
        process.limit_threads()  # the first engine has been made
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


def test_another_allocator_stays_as_it_is(monkeypatch, caplog):
    """TypeError: as on Windows, where CDLL(None) is refused. The last one: a library without mallopt, as musl's and macOS's."""
    for library in (Mock(side_effect=OSError), Mock(side_effect=TypeError), Mock(return_value=SimpleNamespace())):
        monkeypatch.setattr(process.ctypes, "CDLL", library)
        process.keep_freed_memory()
    assert caplog.text == ""


def test_the_current_cuda_device_is_set_and_logged(monkeypatch, caplog):
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    for index in (1, 1, 0):
        process.set_cuda_device(torch.device("cuda", index))
    process.set_cuda_device(torch.device("cuda"))  # the current one, which a trainer may have chosen
    assert devices == [1, 1, 0]
    assert caplog.text.count("process-wide: the current CUDA device is cuda:1") == 1
    assert caplog.text.count("process-wide: the current CUDA device is cuda:0") == 1


# An engine computes in two threads. Then a forked process uses it, and makes engines of its own with one thread and with three.
_FORK = """
import json, multiprocessing, warnings
import torch
from nanoinfer import LLM, SamplingParams
from nanoinfer.fast.cpu.threads import num_threads

def token_ids(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    return [output.outputs[0].token_ids for output in llm.generate(["Once upon a time"] * 3, params, use_tqdm=False)]

def work(connection, llm):
    try:
        connection.send(token_ids(llm))
    except Exception as error:
        connection.send(str(error))
    for enforce_eager in (True, False):
        llm = LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**22, enforce_eager=enforce_eager)
        connection.send(token_ids(llm))
    torch.set_num_threads(3)  # torch's own threads would hang, but no operation of this step is divided among them
    connection.send(token_ids(llm))
    connection.send(token_ids(LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**22)))
    connection.send([torch.get_num_threads(), num_threads()])

torch.set_num_threads(2)
llm = LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**22)
replies = [token_ids(llm)]
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
fork = multiprocessing.get_context("fork")
receives, sends = fork.Pipe(duplex=False)
process = fork.Process(target=work, args=(sends, llm))
process.start()
for _ in range(6):
    replies.append(receives.recv() if receives.poll(600) else "it hangs")
process.kill()
print(json.dumps([*replies, token_ids(llm), torch.get_num_threads()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_refuses_the_llm_it_was_born_with_and_a_new_one_gives_the_same_tokens():
    child = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    expected, refusal, *answers, in_child, afterwards, num_threads = json.loads(child.stdout)
    assert "this LLM was made in another process" in refusal
    assert answers == [expected] * 4
    assert in_child == [1, 3]
    assert (afterwards, num_threads) == (expected, 2)  # the first process goes on in two threads


# What an import can change, by its name. nanoinfer is imported after everything that it imports from elsewhere, which a forked
# process finds out. Then modules that break the promise are imported, one for each line of argv[1].
_IMPORTS = """
import atexit, builtins, contextlib, gc, faulthandler, importlib, json, locale, logging, multiprocessing, os, pkgutil, random
import signal, sys, threading, types, warnings
from itertools import chain
import torch

def state():
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    return {
        "sys.meta_path": list(sys.meta_path), "sys.path_hooks": list(sys.path_hooks), "sys.path": list(sys.path),
        "sys.std": [sys.stdin, sys.stdout, sys.stderr], "sys.builtins": dict(vars(builtins)),
        "sys.hooks": [sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook],
        "sys.trace": [sys.gettrace(), sys.getprofile()], "sys.limits": [sys.getswitchinterval(), sys.getrecursionlimit()],
        "os.environ": dict(os.environ), "os.getcwd": os.getcwd(), "os.threads": len(os.listdir("/proc/self/task")),
        "atexit": atexit._ncallbacks(), "signal": signals, "faulthandler": faulthandler.is_enabled(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks)],
        "warnings": [list(warnings.filters), warnings.showwarning, warnings.formatwarning],
        "logging.root": [list(logging.root.handlers), logging.root.level, logging.root.manager.disable, logging.lastResort],
        "logging.classes": [logging.getLoggerClass(), logging.getLogRecordFactory()],
        "logging.loggers": {name: [list(one.handlers), one.level, one.propagate] for name, one in loggers.items()},
        "locale": locale.setlocale(locale.LC_ALL), "random": random.getstate(),
        "multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "torch.threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch.defaults": [torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()],
        "torch.modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "torch.deterministic": torch.are_deterministic_algorithms_enabled(), "torch.seed": torch.get_rng_state().tolist(),
        "torch.nn.Module": dict(vars(torch.nn.Module)), "torch.Tensor": dict(vars(torch.Tensor)),
    }

def changed(act):
    before = state()
    act()
    after = state()
    loggers = "logging.loggers"  # new ones are made by getLogger, and the package's own ones are its own
    after[loggers] = {name: after[loggers].get(name) for name in before[loggers]}
    return [name for name in before if before[name] != after[name]]

def import_all():
    import nanoinfer, nanoinfer_course, nanoinfer_lab

    packages = nanoinfer, nanoinfer_lab, nanoinfer_course
    for module in chain(*(pkgutil.walk_packages(each.__path__, f"{each.__name__}.") for each in packages)):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ImportError as error:  # what an extra would install
            assert not (error.name or "").startswith("nanoinfer"), error

reads, writes = os.pipe()
if os.fork() == 0:
    import_all()
    with open(writes, "w") as pipe:
        json.dump([name for name in sys.modules if not name.startswith("nanoinfer")], pipe)
    os._exit(0)
os.close(writes)
with open(reads) as pipe:
    for name in json.load(pipe):
        with contextlib.suppress(Exception):  # a module that another library makes, and no file
            importlib.import_module(name)
own = changed(import_all)
injected = [changed(lambda: exec(line, {})) for line in json.loads(sys.argv[1])]
print(json.dumps([own, injected, sum(name.startswith("nanoinfer.") for name in sys.modules)]))
"""

# What an import of the package might do one day -> what of the process that changes.
_INJECTED = {
    "import sys; sys.path.append('x')": "sys.path",
    "import sys; sys.excepthook = print": "sys.hooks",
    "import os; os.environ['X'] = 'y'": "os.environ",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": "os.threads",
    "import atexit; atexit.register(len, ())": "atexit",
    "import signal; signal.signal(signal.SIGTERM, print)": "signal",
    "import gc; gc.set_threshold(5)": "gc",
    "import warnings; warnings.simplefilter('ignore')": "warnings",
    "import logging; logging.basicConfig()": "logging.root",
    "import logging; logging.getLogger('torch').setLevel(5)": "logging.loggers",
    "import random; random.seed(1)": "random",
    "import torch; torch.set_num_threads(torch.get_num_threads() + 1)": "torch.threads",
    "import torch; torch.set_grad_enabled(False)": "torch.modes",
    "import torch; torch.manual_seed(5)": "torch.seed",
    "import torch; torch.nn.Module.__call__ = print": "torch.nn.Module",
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and forks")
def test_importing_any_module_changes_nothing_of_the_process():
    """Also the negative control: what an import might change is noticed."""
    command = [sys.executable, "-c", _IMPORTS, json.dumps(list(_INJECTED))]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    own, injected, num_modules = json.loads(child.stdout.splitlines()[-1])
    assert own == []
    assert num_modules > 100
    assert [line for (line, name), found in zip(_INJECTED.items(), injected, strict=True) if name not in found] == []
