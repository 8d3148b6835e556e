"""The process for work that may never end: it does not start, is busy, is killed, or is stopped."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanoinfer.errors import HelperProcessError, QueueFullError
from nanoinfer.system import helper_process
from nanoinfer.system.helper_process import HelperProcess

# Answers [signal, how often]: it sends itself the signal that many times, once in each process. "spin" never ends.
MODULE = """
import json, os, pathlib
from nanoinfer.system.helper_process import serve

sent = pathlib.Path(__file__).with_suffix(".sent")

def answer(request):
    request = json.loads(request)
    if request == "spin":
        while True:
            pass
    number, times = request
    num_sent = len(sent.read_text()) if sent.exists() else 0
    if num_sent < times:
        sent.write_text("x" * (num_sent + 1))
        os.kill(os.getpid(), number)
    return num_sent

if __name__ == "__main__":
    serve(lambda: answer, max_seconds=0.05, max_bytes=2**30)
"""


@pytest.fixture
def helper(tmp_path, monkeypatch):
    (tmp_path / "suffering.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    helper = HelperProcess("suffering", "sufferers", max_wait=60.0, max_seconds=60.0)
    yield helper
    helper.close()


class WhenStopped(threading.Thread):
    """A Timer whose time is over when the process is stopped."""

    def __init__(self, seconds, kill):
        super().__init__(daemon=True)
        self.stat, self.kill, self.is_cancelled = Path(f"/proc/{kill.__self__.pid}/stat"), kill, False

    def run(self):
        while not self.is_cancelled:
            try:
                state = self.stat.read_text().rpartition(")")[2].split()[0]
            except OSError:  # the process has ended, and its Popen has seen it
                return
            if state == "T":
                self.kill()
                return
            time.sleep(0.001)

    def cancel(self):
        self.is_cancelled = True


def test_a_process_that_does_not_start_is_an_error_that_says_how_to_see_why():
    helper = HelperProcess("nanoinfer.no_such_module", "new grammars", max_wait=1.0, max_seconds=60.0)
    for _ in range(2):
        with pytest.raises(HelperProcessError, match=r"new grammars did not start.* -m nanoinfer.no_such_module` shows why"):
            helper.ask("{}")


def test_a_request_waits_for_others_no_longer_than_max_wait():
    helper = HelperProcess("nanoinfer.no_such_module", "new grammars", max_wait=0.05, max_seconds=60.0)
    with helper._lock:
        start = time.perf_counter()
        with pytest.raises(QueueFullError, match="too many new grammars wait already; try again later"):
            helper.ask("{}")
        assert time.perf_counter() - start >= 0.05


def test_a_start_that_takes_longer_than_max_wait_refuses_no_request(helper, monkeypatch):
    is_starting, has_waited, replies = threading.Event(), threading.Event(), []
    start_python = helper_process.start_python

    def late(*arguments, **options):
        is_starting.set()
        has_waited.wait(600)
        return start_python(*arguments, **options)

    monkeypatch.setattr(helper_process, "start_python", late)
    monkeypatch.setattr(helper, "_max_wait", 0.01)
    threads = [threading.Thread(target=lambda: replies.append(helper.ask("[0, 0]"))) for _ in range(2)]
    threads[0].start()
    is_starting.wait(600)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    monkeypatch.setattr(helper, "_max_wait", 60.0)
    has_waited.set()
    for thread in threads:
        thread.join()
    assert replies == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_is_killed_while_idle_or_at_work_costs_no_request(helper, number):
    assert helper.ask(f"[{number:d}, 0]") == 0
    os.kill(helper._process.pid, number)
    assert helper.ask(f"[{number:d}, 0]") == 0
    assert helper.ask(f"[{number:d}, 1]") == 1  # it was killed once, and tried again


def test_one_exit_function_ends_the_process_however_often_it_was_started(helper, monkeypatch):
    registered = []
    monkeypatch.setattr(helper_process.atexit, "register", registered.append)
    for _ in range(2):
        assert helper.ask("[0, 0]") == 0
        helper.close()
    assert registered == [helper.close]


def test_a_process_that_is_killed_at_every_attempt_is_not_the_requests_fault(helper):
    with pytest.raises(HelperProcessError, match="was killed, 2 times"):
        helper.ask(f"[{signal.SIGKILL:d}, 2]")
    assert helper.ask(f"[{signal.SIGKILL:d}, 2]") == 2


def test_a_request_that_crashes_at_every_attempt_or_takes_too_long_has_no_reply(helper):
    assert helper.ask(f"[{signal.SIGABRT:d}, 2]") is None
    assert helper.ask('"spin"') is None
    assert helper.ask("[0, 0]") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_stopped_is_killed_and_the_request_tried_again(helper, monkeypatch):
    monkeypatch.setattr(helper_process, "Timer", WhenStopped)
    assert helper.ask(f"[{signal.SIGSTOP:d}, 1]") == 1
    os.kill(helper._process.pid, signal.SIGSTOP)
    assert helper.ask(f"[{signal.SIGSTOP:d}, 1]") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's limit of address space is lowered")
@pytest.mark.parametrize("limit", [2**34, 2**62])
def test_a_lower_limit_of_address_space_is_kept(limit):
    code = f"""
import resource
from nanoinfer.system.helper_process import _limit_memory
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
_limit_memory(2**40)
print(*resource.getrlimit(resource.RLIMIT_AS))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    soft, hard = map(int, output.split())
    assert hard == limit
    assert soft == limit if limit < 2**40 else 2**40 < soft < 2**41
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != soft  # this process's own limit is as it was
