"""No operator of torch starts threads inside a step of compiled kernels, and the caller's own settings stay as they are.

A library that is loaded before torch takes the place of OpenMP's entry, and counts the regions of more than one thread.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoinfer.fast.cpu.threads import num_threads, one_torch_thread
from tests.helpers.threads import run_in_threads

ROOT = Path(__file__).parents[3]

_COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>

static atomic_long num_regions;

long take_num_regions(void) { return atomic_exchange(&num_regions, 0); }

void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = dlsym(RTLD_NEXT, "GOMP_parallel");
    int (*max_threads)(void) = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    if ((num_threads ? num_threads : max_threads()) > 1) num_regions++;
    parallel(body, data, num_threads, flags);
}
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
folder, plain_step, found = Path(sys.argv[1]), LLMEngine.step, {}
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="needs LD_PRELOAD and a C compiler")
def test_no_step_of_the_kernels_starts_a_thread_of_openmp(tmp_path):
    source, counter = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(_COUNTER)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(counter), "-ldl"], check=True)
    command, paths = [sys.executable, "-c", _CASES, str(tmp_path)], {"PYTHONPATH": str(ROOT), "LD_PRELOAD": str(counter)}
    child = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found.pop("eager") > 0
    assert len(found) == 27
    assert found == dict.fromkeys(found, 0)


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
