"""A team of more threads than the machine has cores: the threads that wait asleep are woken, and the bits are those of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanoinfer.fast.cpu import program

pytestmark = pytest.mark.usefixtures("kernels")

# One thread is late in each round: it waits until all others sleep at the barrier. Returns how often a thread went on
# before all others had arrived.
_LATE = f"""
#include <omp.h>
#include "{Path(program.__file__).with_name("program.h").as_posix()}"

extern "C" int num_too_early(int num_threads, int num_rounds) {{
    Barrier barrier;
    std::atomic<int> num_arrived{{0}}, num_early{{0}};
#pragma omp parallel num_threads(num_threads)
    for (int round = 0; round < num_rounds; round++) {{
        const bool is_late = round % omp_get_num_threads() == omp_get_thread_num();
        while (is_late && barrier.num_sleeping.load() < omp_get_num_threads() - 1) sched_yield();
        num_arrived++;
        barrier.wait(omp_get_num_threads());
        num_early += num_arrived.load() < (round + 1) * omp_get_num_threads();
    }}
    return num_early + (num_arrived.load() != num_threads * num_rounds);
}}
"""

# Both in a process of its own, which is stopped if a thread is never woken.
_MANY_THREADS = """
import json, sys
from pathlib import Path
import torch
from nanoinfer import LLM, SamplingParams
from nanoinfer.fast.cpu import native

num_early = native.load(Path(sys.argv[1])).num_too_early
answers = []
for num_threads in (1, 5, 8):
    torch.set_num_threads(num_threads)
    llm = LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**22)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=3)
    outputs = llm.generate(["Once upon a time", "The end"], params, use_tqdm=False)
    answers.append([str(output.outputs[0].logprobs) for output in outputs])
print(json.dumps([num_early(5, 100), num_early(8, 100), *answers]))
"""


@pytest.mark.slow
def test_more_threads_than_cores_end_and_give_the_bits_of_one_thread(tmp_path):
    """5 and 8 threads. On a machine with more cores the barrier's test still makes them sleep."""
    source = tmp_path / "late.cpp"
    source.write_text(_LATE)
    command = [sys.executable, "-c", _MANY_THREADS, str(source)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    early_of_five, early_of_eight, expected, five, eight = json.loads(child.stdout)
    assert (early_of_five, early_of_eight) == (0, 0)
    assert five == eight == expected
