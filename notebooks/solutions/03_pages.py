"""Solutions of notebook 03."""

import random
from dataclasses import replace

from definitions import definitions

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import BatchBuilt, BlockCopied, StepScheduled
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer_lab.bench.workloads import Workload

notebook = definitions("03_pages")
BYTES_PER_TOKEN = 2304

# Exercise 1: B is freed before A grows, and a third sequence of 9 tokens comes
manager = BlockManager(num_blocks=6, block_size=4)
a, b, c = (
    Sequence(name, list(range(first, first + length)), SamplingParams(), seed=0, max_num_tokens=20)
    for name, first, length in (("A", 100, 7), ("B", 200, 3), ("C", 300, 9))
)
for seq in (a, b):
    manager.allocate(seq, seq.num_new_tokens)
    seq.num_computed_tokens = seq.num_tokens
manager.free(b)
for token_id in (107, 108):
    a.token_ids.append(token_id)
    manager.allocate(a, 1)
    a.num_computed_tokens += 1
manager.allocate(c, c.num_new_tokens)
c.num_computed_tokens = c.num_tokens
print("A", a.block_table, " C", c.block_table)
notebook.draw_pool(6, 4, a, c)
# Block 2 held nothing that can be found (B had not filled it), so it is the first to be taken again: A gets it.
assert a.block_table == [0, 1, 2]
assert c.block_table == [3, 4, 5]

# Exercise 2: four answers to one prompt, of 37 and of exactly 48 tokens
llm = LLM(device="cpu", tracer=(recorder := Recorder()), block_size=16, kv_cache_memory=24 * 16 * BYTES_PER_TOKEN)
params = SamplingParams(temperature=0.7, seed=1, max_tokens=4, ignore_eos=True, n=4)
num_copies = {}
for length in (37, 48):
    recorder.clear()
    llm.generate({"prompt_token_ids": list(range(100, 100 + length))}, params, use_tqdm=False)
    num_copies[length] = len(recorder.of(BlockCopied))
    print(f"a prompt of {length} tokens: {num_copies[length]} copies")
# Four answers want to write into the part-filled third block: three get a copy, the last writes in place. A prompt of 48 tokens
# fills its three blocks, so every answer begins a block of its own, and nothing is copied.
assert num_copies == {37: 3, 48: 0}

# Exercise 3: answers of 300 to 400 tokens
# To be quick, a third of the requests in a third of the pool.
rng = random.Random(0)
lens = [(rng.randint(8, 64), rng.randint(300, 400)) for _ in range(8)]
work = Workload(name="long", input_lens=tuple(i for i, _ in lens), output_lens=tuple(o for _, o in lens))
llm = LLM(device="cpu", tracer=(recorder := Recorder()), block_size=16, kv_cache_memory=683 * BYTES_PER_TOKEN)
prompts = [{"prompt_token_ids": ids} for ids in work.prompts(vocab_size=1959, run=0)]
llm.generate(prompts, [replace(one, detokenize=False) for one in work.params()], use_tqdm=False)
steps, batches = recorder.of(StepScheduled), recorder.of(BatchBuilt)
num_running = [len(step.running) for step in steps]
reserved = llm.engine.max_model_len * sum(num_running)
tokens = sum(sum(batch.seq_lens) for batch in batches)
num_preempted = sum(len(step.preempted) for step in steps)
print(f"at once: {max(num_running)} at most, {sum(num_running) / len(steps):.1f} on average, {num_preempted} preemptions")
print(f"a reservation would be used to {tokens / reserved:.0%}")
# The sequences come nearer to the length that a reservation assumes, so pages save less. Many start at once, because their
# prompts are short, and as they grow the pool is full: the youngest are preempted.
assert num_preempted > 0
assert max(num_running) > 683 // llm.engine.max_model_len
