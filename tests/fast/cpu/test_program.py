"""The team of threads behind programs: what its members wait for, and what each of them does."""

import json
import subprocess
import sys

import pytest

from nanoinfer.fast.cpu import native

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.slow]

_KERNELS = f"""
#include "{(native.HEADERS / "program.h").as_posix()}"

#include <deque>
#include <thread>

// One thread is late in each round: it waits until all others sleep at the barrier. Returns how often a thread went on
// before all others had arrived.
extern "C" int num_too_early(int num_threads, int num_rounds) {{
    Barrier barrier;
    std::atomic<int> num_arrived{{0}}, num_early{{0}};
    std::deque<std::thread> threads;
    for (int index = 0; index < num_threads; index++) threads.emplace_back([&, index] {{
        for (int round = 0; round < num_rounds; round++) {{
            const bool is_late = round % num_threads == index;
            while (is_late && barrier.round.num_sleeping.load() < num_threads - 1) std::this_thread::yield();
            num_arrived++;
            barrier.wait(num_threads);
            num_early += num_arrived.load() < (round + 1) * num_threads;
        }}
    }});
    for (std::thread& thread : threads) thread.join();
    return num_early + (num_arrived.load() != num_threads * num_rounds);
}}

// Counts how often each of n tasks is done. The thread that has task 0 has lost its core until all others are done.
extern "C" void count(const int64_t* n, const Batch& batch, Member& me) {{
    auto* counts = static_cast<std::atomic<int64_t>*>(batch.arrays[0]);
    for (int64_t task : me.tasks(*n)) {{
        while (task == 0 && counts[*n] < *n - 1) std::this_thread::yield();
        counts[task]++, counts[*n]++;
    }}
}}

// Each member's product of two small numbers.
extern "C" void multiply(const int64_t*, const Batch& batch, Member& me) {{
    auto* x = static_cast<volatile float*>(batch.arrays[0]);
    static_cast<float*>(batch.arrays[1])[me.index] = x[0] * x[1];
}}

// Returns when flags[1] is set. flags[0] tells that it has begun.
extern "C" void hold(const int64_t*, const Batch& batch, Member&) {{
    auto* flags = static_cast<std::atomic<int64_t>*>(batch.arrays[0]);
    for (flags[0] = 1; flags[1] == 0;) std::this_thread::yield();
}}

extern "C" void release(const int64_t*, const Batch& batch, Member& me) {{
    auto* flags = static_cast<std::atomic<int64_t>*>(batch.arrays[0]);
    if (me.index == 0) flags[2] = me.num_threads, flags[1] = 1;
}}
"""

# In a process of its own, which is stopped if a thread is never woken.
_SCRIPT = """
import ctypes, json, os, signal, sys, threading, time
from pathlib import Path
import torch
from nanoinfer import LLM, SamplingParams
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Program
from tests.helpers import precompiled

precompiled.install()

class Number(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64)]

def program(name, n=0):
    return Program([KernelCall(getattr(kernels, name), Number(n))])

def logprobs():
    llm = LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**22)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3)
    outputs = llm.generate(["Once upon a time", "The end"], params, use_tqdm=False)
    return [str(output.outputs[0].logprobs) for output in outputs]

kernels, found = native.load(Path(sys.argv[1])), {}
found["too early"] = [kernels.num_too_early(5, 40), kernels.num_too_early(8, 40)]

torch.set_num_threads(5)
found["counts"] = []
for n in (1, 4, 5, 37, 1000):
    counts = torch.zeros(n + 1, dtype=torch.int64)
    program("count", n)(1, [counts])
    found["counts"].append(counts.tolist() == [*[1] * n, n])

child = os.fork()
if child == 0:
    signal.alarm(600)
    torch.set_num_threads(3)
    counts = torch.zeros(38, dtype=torch.int64)
    program("count", 37)(1, [counts])
    os._exit(counts.tolist() != [*[1] * 37, 37])
found["forked"] = os.waitpid(child, 0)[1]

small, products = torch.tensor([1e-20, 1e-20]), torch.zeros(5)
torch.set_flush_denormal(True)
program("multiply")(1, [small, products])
found["denormals"] = [products.view(torch.int32).unique().tolist(), (small[:1] * small[1:]).view(torch.int32).item()]
torch.set_flush_denormal(False)
found["denormals"].append((small[:1] * small[1:]).view(torch.int32).item())

flags = torch.zeros(3, dtype=torch.int64)
holder = threading.Thread(target=program("hold"), args=(1, [flags]))
holder.start()
while not flags[0]:
    time.sleep(0.001)
program("release")(1, [flags])
holder.join()
found["members of a second job"] = flags[2].item()

answers = []
for num_threads in (1, 5, 2):
    torch.set_num_threads(num_threads)
    answers.append(logprobs())
engines = [threading.Thread(target=lambda: answers.append(logprobs())) for _ in range(2)]
for engine in engines:
    engine.start()
for engine in engines:
    engine.join()
found["numbers of answers"] = [len(answers), len(set(map(str, answers)))]

time.sleep(0.2)
before = time.process_time()
time.sleep(0.5)
found["idle"] = time.process_time() - before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    source = tmp_path_factory.mktemp("team") / "kernels.cpp"
    source.write_text(_KERNELS)
    child = subprocess.run([sys.executable, "-c", _SCRIPT, str(source)], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


SENTENCES = {  # what the process found -> what it had to find
    "no thread passes the barrier early and sleepers are woken": ("too early", [0, 0]),
    "every task is done once while a thread has lost its core": ("counts", [True] * 5),
    "a forked process makes a team of its own": ("forked", 0),
    # 1e-20 * 1e-20 is the 71362nd denormal number
    "every member computes with denormal numbers and restores its setting": ("denormals", [[71362], 0, 71362]),
    "a second job at the same time has a single thread and does not wait": ("members of a second job", 1),
    "any number of threads and two engines at once give the same bits": ("numbers of answers", [5, 1]),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_of_a_team_of_threads(sentence, found):
    what, expected = SENTENCES[sentence]
    assert found[what] == expected


def test_an_idle_team_sleeps(found):
    assert found["idle"] < 0.05  # seconds of CPU in half a second
