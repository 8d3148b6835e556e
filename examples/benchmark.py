"""Tokens per second for different numbers of sequences, which shows why an engine batches. `nanoinfer bench` measures more."""

import random
import time

from nanoinfer import LLM, SamplingParams

llm = LLM()
vocab_size = llm.info.vocab_size
random.seed(0)
params = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False, seed=0)
for num_seqs in (1, 4, 16, 64):
    prompts = [[random.randrange(vocab_size) for _ in range(16)] for _ in range(num_seqs)]
    llm.generate(prompts, params, use_tqdm=False)  # the first run compiles
    prompts = [ids[::-1] for ids in prompts]  # so that the prefix cache has none of them
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{num_seqs:3d} sequences: {num_tokens / took:8.0f} tokens/s, {1000 * took / 64:6.2f} ms per step")
