"""Where the system starts no thread or has no memory, kernels run with the threads that exist, or an error says so.

A library that is loaded before all others simulates such a system: its pthread_create fails after a number of calls.
"""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest
import torch

from nanoinfer.errors import OutOfMemoryError, UnsupportedError
from nanoinfer.fast.cpu import native, program

LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

static atomic_int left = 1000;

void allow(int num) { left = num; }

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*), void* argument) {
    int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = dlsym(RTLD_NEXT, "pthread_create");
    return left-- > 0 ? create(thread, attributes, function, argument) : EAGAIN;
}
"""

# Each number of threads has a forked process, because a team keeps the threads that it has. Torch's threads run before.
SCRIPT = """
import asyncio, ctypes, os, signal, sys, traceback
import torch
from nanoinfer import AsyncLLM, LLM, SamplingParams
from nanoinfer.errors import OutOfThreadsError

library, num_threads, is_async, *numbers = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=8)

def generate():
    llm = LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**24)
    return llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids

async def stream():
    async with AsyncLLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**24) as llm:
        async for output in llm.generate("Once upon a time", params):
            pass
        return output.outputs[0].token_ids

for number in numbers:
    if child := os.fork():
        print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(600)  # a hang ends
    torch.set_num_threads(int(num_threads))
    ctypes.CDLL(library).allow(int(number))
    try:
        print(number, asyncio.run(stream()) if int(is_async) else generate(), flush=True)
    except OutOfThreadsError as error:
        print(number, error, flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


@pytest.fixture
def outcomes(tmp_path):
    """Return a function that gives what a process prints and its exit status, for each number of threads that may start."""
    if sys.platform != "linux":
        pytest.skip("the library is one of Linux")
    compiler = shutil.which("gcc") or shutil.which("g++") or pytest.skip("there is no gcc")
    library, script = tmp_path / "threads.so", tmp_path / "script.py"
    source = tmp_path / "threads.c"
    source.write_text(LIBRARY)
    script.write_text(SCRIPT)
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)

    def run(num_threads, numbers, *, is_async=False):
        done = subprocess.run(
            [sys.executable, str(script), *map(str, (library, num_threads, int(is_async), *numbers))],
            env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
        assert len(lines) == 2 * len(numbers), done.stdout + done.stderr[-2000:]
        return {int(number): (said, status) for (number, said), (_, status) in zip(lines[::2], lines[1::2], strict=True)}

    return run


def check(found, *, may_fail=False):
    """Check that every process has ended well: with the same tokens, or with an error that has a hint."""
    assert {status for _, status in found.values()} == {"0"}, found
    error = "the system starts no more threads; raise the limit of processes"
    answers = {said for said, _ in found.values() if not (may_fail and said.startswith(error))}
    assert len(answers) == 1, found
    assert answers.pop().count(",") == 7


@pytest.mark.slow
def test_kernels_give_the_same_tokens_with_the_threads_that_the_system_starts(outcomes):
    check(outcomes(3, [0, 1, 100]))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_any_number_of_threads_gives_the_same_tokens_or_an_error(is_async, outcomes):
    """AsyncLLM needs a thread for the engine, and others that prepare requests."""
    check(outcomes(6, [*range(12), 100], is_async=is_async), may_fail=is_async)


KERNEL = """
#include <new>
#include "program.h"

extern "C" void count(const int64_t* failing, const Batch& batch, Member& me) {
    for (int64_t task : me.tasks(100)) {
        if (task == *failing) throw std::bad_alloc();
        static_cast<int64_t*>(batch.arrays[0])[task]++;
    }
}
"""


class Failing(ctypes.Structure):
    _fields_ = (("task", ctypes.c_int64),)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_kernel_without_memory_is_an_error_and_no_call_follows(num_threads, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "num_threads", lambda: num_threads)
    source = tmp_path / "count.cpp"
    source.write_text(KERNEL)
    try:
        kernel = native.load(source).count
    except UnsupportedError as error:
        pytest.skip(str(error))
    counts = torch.zeros(100, dtype=torch.int64)
    fails, works = (program.KernelCall(kernel, Failing(task)) for task in (70, -1))
    with pytest.raises(OutOfMemoryError, match="memory ran out in a step; lower max_num_batched_tokens"):
        program.Program([works, fails, works])(0, [counts])
    assert set(counts.tolist()) <= {1, 2}
    assert counts[70] == 1
    program.Program([works, works])(0, [counts])  # the team has not lost a member
    assert counts[70] == 3
