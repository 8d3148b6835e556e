"""A step of compiled kernels and threads: torch starts none in it, the kernels do with those that the system starts.

Libraries that are loaded before all others count the regions of OpenMP, and let pthread_create fail after a number of calls.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoinfer.errors import OutOfMemoryError
from nanoinfer.fast.cpu import native, program
from nanoinfer.fast.cpu.threads import num_threads, one_torch_thread
from tests.helpers.threads import run_in_threads

pytestmark = pytest.mark.usefixtures("kernels")
ROOT = Path(__file__).parents[3]


_LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

static atomic_long num_regions;
static atomic_int left = 1000;

long take_num_regions(void) { return atomic_exchange(&num_regions, 0); }

void allow(int num) { left = num; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = dlsym(RTLD_NEXT, "GOMP_parallel");
    int (*max_threads)(void) = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    if ((num_threads ? num_threads : max_threads()) > 1) num_regions++;
    parallel(body, data, num_threads, flags);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*), void* argument) {
    int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = dlsym(RTLD_NEXT, "pthread_create");
    return left-- > 0 ? create(thread, attributes, function, argument) : EAGAIN;
}
"""

# Each number of threads has a forked process, because a team keeps the threads that it has. Torch's threads run before.
_NUMBERS = """
import asyncio, ctypes, os, signal, sys, traceback
import torch
from nanoinfer import AsyncLLM, LLM, SamplingParams
from nanoinfer.errors import OutOfThreadsError
from tests.helpers import precompiled

precompiled.install()
library, _, num_threads, is_async, *numbers = sys.argv[1:]
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


# Prints the number of regions in the steps of each case. 64 rows of 4,096 logits are more than torch computes in one thread.
_CASES = """
import ctypes, json, sys
from pathlib import Path
import torch
from nanoinfer import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.features.adapters.request import LoRARequest
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import linear_shapes, write_adapter

VOCAB, NUM_ROWS = 4096, 64
take_num_regions = ctypes.CDLL(None).take_num_regions
folder, plain_step, found = Path(sys.argv[2]), LLMEngine.step, {}
torch.set_num_threads(2)

def step(engine):
    take_num_regions()
    finished = plain_step(engine)
    found[case] = found.get(case, 0) + take_num_regions()
    return finished

LLMEngine.step = step
PROMPTS = [[(7 * i + j) % 500 for j in range(20)] for i in range(NUM_ROWS)]

def path_of(family):
    path = folder / family
    if not path.exists():
        widths = {"hidden_size": 64, "intermediate_size": 128} if family == "qwen3" else {}  # whole groups of rounded weights
        tiny_models.save(family, path, vocab_size=VOCAB, **widths)
    return str(path)

def load(family, **settings):
    return LLM(path_of(family), kv_cache_memory=2**25, max_num_seqs=NUM_ROWS, seed=0, **settings)

def generate(name, llm, prompts=PROMPTS, lora_request=None, **params):
    global case
    case = name
    params = SamplingParams(**{"max_tokens": 2, "ignore_eos": True, "detokenize": False, **params})
    llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)

SAMPLING = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {5: 1.0}},
    "bans": {"allowed_token_ids": list(range(4000)), "bad_words": [[5]], "no_repeat_ngram_size": 2, "min_tokens": 2},
    "processors": {"logits_processors": [lambda prompt, output, logits: logits * 2]},
    "logprobs": {"logprobs": 5},
    "all logprobs": {"logprobs": -1, "max_tokens": 1},
    "prompt_logprobs": {"prompt_logprobs": 5},
}
llm = load("qwen3")
for name, params in SAMPLING.items():
    generate(name, llm, **params)
generate("prefix hits", llm, [[*range(100), i] for i in range(NUM_ROWS)])
case = "beams"
llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS[:16]], BeamSearchParams(beam_width=4, max_tokens=3))
case = "embeddings"
llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
for name, settings in {
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "n-grams": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}},
    "draft model": {"speculative_config": {"method": "draft_model", "model": path_of("qwen3"), "adaptive": False}},
}.items():
    generate(name, load("qwen3", **settings), temperature=0)
digits = StructuredOutputsParams(regex="[0-9]+")
bundled = LLM("tiny-qwen3", kv_cache_memory=2**25, max_num_seqs=NUM_ROWS)
generate("structured output", bundled, ["Once upon a time"] * NUM_ROWS, structured_outputs=digits, ignore_eos=False)
adapter = folder / "adapter"
write_adapter(adapter, linear_shapes(Path(path_of("qwen3"))), lora_alpha=16)
generate("adapters", load("qwen3", enable_lora=True), lora_request=LoRARequest("adapter", 1, str(adapter)))
for family in ("gemma3_window", "gpt_oss_window", "qwen3_5", "qwen3_next", "qwen3_moe"):
    generate(family, load(family))
tiny_models.add_mtp(Path(path_of("qwen3_5")))
generate("mtp", load("qwen3_5", speculative_config={"method": "mtp", "adaptive": False}), temperature=0)
generate("eager", load("qwen3", enforce_eager=True), max_tokens=1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return a function that runs scripts in one process, and returns the lines that they print."""
    if sys.platform != "linux" or not shutil.which("gcc"):
        pytest.skip("needs LD_PRELOAD and gcc")
    folder = tmp_path_factory.mktemp("threads")
    source, library = folder / "library.c", folder / "library.so"
    source.write_text(_LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)

    def run(*scripts, num_threads, numbers, is_async=False):
        arguments = library, folder, num_threads, int(is_async), *numbers
        command = [sys.executable, "-c", "".join(scripts), *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)}
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert child.returncode == 0, child.stderr
        return child.stdout.splitlines()

    return run


@pytest.fixture(scope="module")
def few_threads_and_regions(outcomes):
    return outcomes(_NUMBERS, _CASES, num_threads=3, numbers=[0, 1, 100])


@pytest.mark.slow
def test_no_step_of_the_kernels_starts_a_thread_of_openmp(few_threads_and_regions):
    found = json.loads(few_threads_and_regions[-1])
    assert found.pop("eager") > 0
    assert len(found) == 27
    assert found == dict.fromkeys(found, 0)


def assert_all_end_well(lines, *, may_fail=False):
    """Every process must give the same tokens, or if it may fail, an error that has a hint."""
    assert [line.split()[1] for line in lines[1::2]] == ["0"] * (len(lines) // 2)  # exit statuses
    error = "the system starts no more threads; raise the limit of processes"
    answers = {line.split(" ", 1)[1] for line in lines[::2]}
    [answer] = (said for said in answers if not (may_fail and said.startswith(error)))
    assert answer.count(",") == 7


@pytest.mark.slow
def test_kernels_give_the_same_tokens_with_the_threads_that_the_system_starts(few_threads_and_regions):
    assert_all_end_well(few_threads_and_regions[:6])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_any_number_of_threads_gives_the_same_tokens_or_an_error(is_async, outcomes):
    """AsyncLLM needs a thread for the engine, and others that prepare requests."""
    lines = outcomes(_NUMBERS, num_threads=6, numbers=[*range(12), 100], is_async=is_async)
    assert len(lines) == 2 * 13
    assert_all_end_well(lines, may_fail=is_async)


def test_torchs_threads_are_those_of_the_caller_before_and_after_a_step():
    before, seen = torch.get_num_threads(), {}

    def other_thread(i):
        seen[i] = torch.get_num_threads()

    try:
        for num in (3, 2):  # also when it is changed between two steps
            torch.set_num_threads(num)
            with one_torch_thread():
                with one_torch_thread():
                    assert (torch.get_num_threads(), num_threads()) == (1, num)
                assert (torch.get_num_threads(), num_threads()) == (1, num)
                run_in_threads(other_thread)
            assert (torch.get_num_threads(), num_threads()) == (num, num)
            assert seen == dict.fromkeys(range(4), num)  # threads that begin while a step runs
    finally:
        torch.set_num_threads(before)


_FAILING_KERNEL = """
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
    source.write_text(_FAILING_KERNEL)
    kernel = native.load(source).count
    counts = torch.zeros(100, dtype=torch.int64)
    fails, works = (program.KernelCall(kernel, Failing(task)) for task in (70, -1))
    with pytest.raises(OutOfMemoryError, match="memory ran out in a step; lower max_num_batched_tokens"):
        program.Program([works, fails, works])(0, [counts])
    assert set(counts.tolist()) <= {1, 2}
    assert counts[70] == 1
    program.Program([works, works])(0, [counts])  # the team has not lost a member
    assert counts[70] == 3
