"""Stream the text of each token, and time the tokens."""

import time
from itertools import pairwise

from nanoinfer import LLM, SamplingParams

llm = LLM()
params = SamplingParams(temperature=0.7, seed=4, max_tokens=200, stop=["The end"])

times = [time.perf_counter()]
for delta in llm.stream("Once upon a time", params):  # leaving the loop early aborts the request
    print(delta.text, end="", flush=True)
    times.append(time.perf_counter())

answer = delta.output.outputs[0]  # the last delta carries the whole output
gaps = sorted(later - earlier for earlier, later in pairwise(times[1:]))
print(f"\n\n{len(answer.token_ids)} tokens, ended by {answer.stop_reason or answer.finish_reason!r}")
print(f"first token after {1000 * (times[1] - times[0]):.1f} ms, then one in {1000 * gaps[len(gaps) // 2]:.2f} ms (median)")
