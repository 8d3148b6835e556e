"""How many Python calls a decode step and a request's life take, counted and not timed. Tests compare them with a record.

    python -m tests.counts.python_calls            # counts
    python -m tests.counts.python_calls --write    # renews the record for this Python and these libraries

A call is an event "call" (a function of Python begins, or a generator goes on) or "c_call" (a function of C is called) of
sys.setprofile. What torch and the C++ kernels do inside such a call is not counted. The same requests are repeated after a
warm-up, in float32 on a CPU, with one thread of torch, and without garbage collection. Of what varies, the median is recorded.

    LLM A, LLM B16   workloads of nanoinfer_lab/bench/workloads.py. "step" is the median of the steps in which every sequence
                     has one new token. "requests" is LLM.generate() with all prompts, from its call to its return.
    server           one streamed completion of 64 tokens over HTTP, from its connection to the end of it. Each step is made
                     when the client has read the event of the one before, so that events never share a delivery. "engine" is
                     the engine's thread, and "event loop" that of HTTP. "event loop, own" are its calls of functions of this
                     package alone, which do not depend on the libraries' versions.

The counts of the server include a few calls of this file. The record has an entry for each environment, because the counts
depend on the versions of Python and of the libraries. Where there is none, nothing is compared.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import queue
import signal
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import nanoinfer
from tests.helpers import recorded_counts

RECORD = Path(__file__).with_name("python_calls.json")
RENEW = "python -m tests.counts.python_calls --write"
ABOUT = f"Numbers of Python calls, by environment. tests/counts/python_calls.py says what is counted. To renew: {RENEW}"
NUM_REPEATS = 3
HTTP_LIBRARIES = ("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "httptools")
PACKAGE = str(Path(nanoinfer.__file__).parent) + os.sep
SERVED = {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True, "seed": 1, "stream": True}


class Calls(Counter):
    """Counts the calls of the thread that has called start(), by the code of a Python function or the name of one of C."""

    def start(self):
        sys.setprofile(self._count)

    def stop(self):
        sys.setprofile(None)

    def _count(self, frame, event, arg):
        if event == "call":
            self[frame.f_code] += 1
        elif event == "c_call" and arg is not sys.setprofile:
            self[arg.__qualname__] += 1

    def own(self):
        """Those of the package's Python functions."""
        return Calls({code: num for code, num in self.items() if getattr(code, "co_filename", "").startswith(PACKAGE)})

    def of(self, function):
        """Return a function that does the same and counts."""

        def counted(*args, **options):
            sys.setprofile(self._count)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(None)

        return counted


def median(counters):
    """The counter whose total is the median."""
    return sorted(counters, key=Counter.total)[(len(counters) - 1) // 2]


def settings():
    import torch

    torch.set_num_threads(1)
    return {"device": "cpu", "dtype": "float32", "enable_prefix_caching": False, "kv_cache_memory": 2**25, "seed": 0}


def count_step(llm, name):
    """Run a workload. Returns: Calls of a decode step."""
    prompts, params = workload(llm, name)
    steps, step = [], llm.engine.step

    def counted_step():
        calls = Calls()
        finished = calls.of(step)()
        steps.append(calls)
        return finished

    llm.engine.step = counted_step
    llm.generate(prompts, params, use_tqdm=False)
    llm.engine.step = step
    return median(steps[2:-2])  # without the steps of prompts and of last tokens


def count_requests(llm, name):
    """Run a workload twice. Returns: Calls of LLM.generate with all prompts."""
    prompts, params = workload(llm, name)
    llm.generate(prompts, params, use_tqdm=False)
    requests = Calls()
    requests.of(llm.generate)(prompts, params, use_tqdm=False)
    return requests


def workload(llm, name):
    """The prompts and the parameters of a workload."""
    from nanoinfer_lab.bench.workloads import WORKLOADS

    return WORKLOADS[name].prompts(llm.engine.executor.info.vocab_size, run=0), WORKLOADS[name].params()


class CountedServer:
    """A server whose engine makes the steps that its client allows, and whose two threads count their calls.

    loop: its event loop.
    """

    def __init__(self, server):
        self._server, self._may_step = server, queue.SimpleQueue()
        engine, step = server.async_llm.engine, server.async_llm.engine.step

        def allowed_step():
            self._may_step.get()
            return step()

        engine.step = allowed_step
        self._stream()  # so that there is a loop
        self.loop = server.async_llm._loop

    def count(self):
        """Stream one answer. Returns: Calls by "engine" and "event loop"."""
        calls = {"engine": Calls(), "event loop": Calls()}
        for action in ("start", "stop"):
            self._in_both(*(getattr(one, action) for one in calls.values()))
            if action == "start":
                self._stream()
        return calls

    def _in_both(self, in_engine, in_loop):
        """Call functions in the engine's thread and in the event loop, as the last act of a command of each."""
        in_thread = self._server.async_llm._thread._commands.put
        for put, function in ((in_thread, in_engine), (self.loop.call_soon_threadsafe, in_loop)):
            is_reached = threading.Event()
            put(lambda is_reached=is_reached, function=function: (is_reached.set(), function()))
            assert is_reached.wait(120)

    def _stream(self):
        body = json.dumps(SERVED).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=120) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            self._may_step.put(None)
            num_events = 0
            for line in connection.makefile("rb"):
                num_events += line.startswith(b"data: {")
                if line.startswith(b"data: {"):
                    self._may_step.put(None)
        assert num_events == SERVED["max_tokens"], num_events
        self._server.wait_until_idle()
        while not self._may_step.empty():  # the last event allowed one more
            self._may_step.get()


def count_server():
    """Returns: Calls of a streamed request's life by "engine" and "event loop"."""
    from nanoinfer import AsyncLLM
    from nanoinfer.server import async_llm
    from nanoinfer.server.run import Server
    from tests.helpers import http_server

    is_over = asyncio.Event()

    async def wait_without_ticks(server):  # uvicorn's own loop ticks every 0.1 s
        await is_over.wait()

    async_llm.HOLD_SECONDS_PER_STREAM = 0
    Server.main_loop = wait_without_ticks
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", **settings())) as server:
        counted = CountedServer(server)
        try:
            counts = [counted.count() for _ in range(2 + NUM_REPEATS)][2:]
        finally:
            counted.loop.call_soon_threadsafe(is_over.set)
    return {name: median([count[name] for count in counts]) for name in counts[0]}


def environments():
    """Describe what the counts depend on. Returns: that of all counts but one, and that of "server event loop"."""
    import torch

    from nanoinfer.errors import UnsupportedError
    from nanoinfer.fast.cpu.attention import KernelBackend

    try:
        KernelBackend(torch.float32, num_heads=4, num_kv_heads=2, head_dim=16)
        kernels = "with kernels"
    except UnsupportedError:
        kernels = "without kernels"
    python = "Python {}.{}".format(*sys.version_info)
    torch_version = "torch " + ".".join(torch.__version__.split(".")[:2])
    versions = {}
    for name in HTTP_LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine = f"{platform.system()} {platform.machine()}"
    libraries = [f"{name} {version}" for name, version in versions.items()]
    return ", ".join((python, torch_version, machine, kernels)), ", ".join((python, machine, *libraries))


def count_all(with_server=True):
    """Returns: for each environment of environments(), Calls by the name of the count."""
    from nanoinfer import LLM

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, which saves calls
    gc.collect()
    gc.disable()  # a collection calls what waits for objects to end
    own, with_libraries = environments()
    llm = LLM("tiny-qwen3", **settings())
    counts = {}
    for name in ("A", "B16"):
        counts |= {f"LLM {name} requests": count_requests(llm, name), f"LLM {name} step": count_step(llm, name)}
    if not with_server:
        return {own: counts}
    server = count_server()
    in_loop = server["event loop"]
    counts["server engine"] = server["engine"]
    counts["server event loop, own"] = in_loop.own()
    return {own: counts, with_libraries: {"server event loop": in_loop}}


def totals(counts):
    return {where: {name: calls.total() for name, calls in named.items()} for where, named in counts.items()}


def complaints(counted, record):
    """Return a sentence for each count that has changed too much, and one for each environment without a record.

    Args:
        counted, record: numbers of calls by environment and name.
    """
    changed, unknown = [], []
    for where, counts in counted.items():
        if where in record:
            recorded = {name: num for name, num in record[where].items() if name in counts}
            changed += recorded_counts.complaints(recorded, counts, RENEW)
        else:
            unknown.append(f"there is no record for {where}; to add one: {RENEW}")
    return changed, unknown


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the record of this environment")
    is_writing = parser.parse_args().write
    counted = totals(count_all(with_server=find_spec("fastapi") is not None))
    print(json.dumps(counted, indent=2))
    if is_writing:
        record = {"about": ABOUT} | dict(sorted((json.loads(RECORD.read_text(encoding="utf-8")) | counted).items()))
        RECORD.write_text(json.dumps(record | {"about": ABOUT}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
