"""Solutions of notebook 06."""

import logging
import random
import threading
import time
from contextlib import contextmanager
from statistics import median

import torch
from definitions import definitions

from nanoinfer import LLM, AsyncLLM, Recorder, SamplingParams
from nanoinfer.features.tracing import StepScheduled
from nanoinfer.server.listen import bind
from nanoinfer.server.run import Server
from nanoinfer.server.settings import ServerSettings

notebook = definitions("06_serving")
torch.set_num_threads(1)
notebook.NUM_TOKENS = 20
LONG = {"prompt": "Once upon a time", "max_tokens": notebook.NUM_TOKENS, "stream": True, "ignore_eos": True}


@contextmanager
def serving(max_num_seqs, max_queued):
    async_llm = AsyncLLM(
        "tiny-qwen3",
        device="cpu",
        max_num_seqs=max_num_seqs,
        max_num_queued_requests=max_queued,
        kv_cache_memory=2**22,
        seed=0,
    )
    settings = ServerSettings(served_model_name=("tiny-qwen3",))
    server = Server(async_llm, settings, shutdown_timeout=5)
    sockets = bind("127.0.0.1", 0)
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.ERROR)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    notebook.PORT = sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


# Exercise 1: one at a time, or twelve together
ttft, tpot = {}, {}
for max_num_seqs in (1, 12):
    with serving(max_num_seqs, max_queued=12):
        notebook.send(LONG | {"seed": 0}, time.perf_counter())  # warm up
        results = notebook.send_all([LONG | {"seed": i} for i in range(12)])
    ttft[max_num_seqs] = median(one.ttft for one in results)
    tpot[max_num_seqs] = median(one.tpot for one in results)
    print(f"{max_num_seqs:2d} at once: TTFT {ttft[max_num_seqs] * 1e3:.0f} ms, TPOT {tpot[max_num_seqs] * 1e3:.1f} ms")
# For a chat: as many as keep TPOT below what one reads, so that nobody waits long for the first token. At night, throughput
# counts alone: as many as the KV cache holds.


# Exercise 2: a client that obeys 429. Its waits are a twentieth of what the server asks for, to be quick.
def patient(i, results):
    rng, wait = random.Random(i), 0.0
    for _ in range(20):
        results[i] = notebook.send(LONG | {"seed": i}, time.perf_counter())
        if results[i].status != 429:
            return
        wait = max(2 * wait, float(results[i].retry_after))
        time.sleep(wait / 20 * rng.uniform(0.5, 1.5))


with serving(max_num_seqs=4, max_queued=8):
    results = [None] * 30
    threads = [threading.Thread(target=patient, args=(i, results)) for i in range(30)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
print(f"{sum(one.status == 200 for one in results)} of {len(results)} served")
assert all(one.status == 200 for one in results)
# Without the random factor all refused clients would come back at the same moment, and most would be refused again.

# Exercise 3: a long prompt among sequences that decode
for chunk_size in (64, 512):
    recorder = Recorder()
    llm = LLM("tiny-qwen3", device="cpu", kv_cache_memory=2**22, chunk_size=chunk_size, tracer=recorder)
    prompts = [{"prompt_token_ids": [5, 6, 7, i]} for i in range(4)] + [{"prompt_token_ids": list(range(10, 410))}]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    largest = max(sum(step.num_new_tokens) for step in recorder.of(StepScheduled))
    print(f"chunk_size {chunk_size}: the largest step has {largest} rows")
    assert (largest >= 400) == (chunk_size == 512)
# With chunks, several steps are a little longer. Without, one step is as long as the whole prefill, and all four users see one
# long gap between two tokens.
