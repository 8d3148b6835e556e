"""Prefix caching: a shared prefix is computed once, and the second call finds the blocks of the first."""

import random
import time

from nanoinfer import LLM, SamplingParams
from nanoinfer_lab import stories

llm = LLM(block_size=16)  # only whole blocks are shared
llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)  # the first run compiles
story = stories.write(random.Random(1))
questions = [story + ending for ending in ("\nOnce", "\nLily", "\nOne day")]

for attempt in ("first time", "once more"):
    start = time.perf_counter()
    outputs = llm.generate(questions, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    took = time.perf_counter() - start
    cached = [f"{output.metrics.num_cached_tokens} of {len(output.prompt_token_ids)}" for output in outputs]
    print(f"{attempt}: {1000 * took:.1f} ms, tokens from the cache: {', '.join(cached)}")
