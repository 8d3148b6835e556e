"""Solutions of notebook 05."""

from definitions import definitions

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import StepScheduled

notebook = definitions("05_scheduling")
BYTES_PER_TOKEN = 2304

# Exercise 1: answers of equal length, in groups and continuously
work = [SamplingParams(temperature=0.7, seed=i, max_tokens=20, ignore_eos=True) for i in range(12)]
num_steps = []
for groups in ([work[:4], work[4:8], work[8:]], [work]):
    recorder, _, _ = notebook.run(groups)
    num_steps.append(len(recorder.of(StepScheduled)))
print(f"static {num_steps[0]} steps, continuous {num_steps[1]} steps")
# Nothing is left of the difference: continuous batching gains where answers end at different times.
assert num_steps[0] == num_steps[1] == 60

# Exercise 2: chunks of 16 and 256
for chunk_size, (times, plan) in zip((16, 256), notebook.gaps(16, 256), strict=True):
    end = 6 + -(-480 // chunk_size)  # one step per chunk, the last of which draws the long prompt's first token
    assert sum(new[-1] for new in plan[6:end]) == 480
    print(f"chunks of {chunk_size:3}: longest gap {times[6:20].max():5.1f} ms, first token after {times[6:end].sum():5.1f} ms")
# The smaller the chunk, the shorter the longest gap, down to the fixed cost of a step. The first token comes the later, because
# every chunk pays that cost.

# Exercise 3: tokens that are computed twice
starts = ["Once upon a time, there was a kind duck named Max. Every morning,", "Lily was a kind penguin", "Once upon a time"]
starts.append("Tom was a brave")
each = [SamplingParams(temperature=0.7, seed=i, max_tokens=40, ignore_eos=True) for i in range(4)]
computed = {}
for caching in (True, False):
    for num_blocks in (6, 7, 12, 32):
        memory = num_blocks * 16 * BYTES_PER_TOKEN
        llm = LLM(
            device="cpu", tracer=(recorder := Recorder()), block_size=16, kv_cache_memory=memory, enable_prefix_caching=caching
        )
        llm.generate(starts, each, use_tqdm=False)
        computed[caching, num_blocks] = sum(sum(step.num_new_tokens) for step in recorder.of(StepScheduled))
for (caching, num_blocks), num_tokens in computed.items():
    more = num_tokens - computed[caching, 32]
    print(f"prefix cache {caching!s:5}, {num_blocks:2} blocks: {num_tokens} tokens computed, {more} of them again")
# Where all fit, nothing is computed again. Below that it depends on who is preempted and when: 7 blocks can cost more than 6.
# The prefix cache saves a part, as long as the blocks of a preempted sequence are not taken meanwhile.
assert computed[False, 6] >= computed[True, 6] > computed[True, 32]
assert computed[True, 32] == computed[False, 32]
