"""Log-probabilities of generated tokens and of the prompt's."""

import math

from vllm import LLM, SamplingParams

llm = LLM(model="tiny-qwen3", logprobs_mode="raw_logprobs", max_logprobs=-1)
params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1, flat_logprobs=False)
[output] = llm.generate(["Once upon a time, there was"], params)
completion = output.outputs[0]
for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
    for candidate_id, logprob in candidates.items():
        chosen = "*" if candidate_id == token_id else " "
        print(f"{chosen} rank {logprob.rank} {logprob.decoded_token!r} {math.exp(logprob.logprob):.3f}")
pairs = zip(completion.token_ids, completion.logprobs, strict=True)
total = sum(candidates[token_id].logprob for token_id, candidates in pairs)
print("Sum:", math.isclose(total, completion.cumulative_logprob))
print("Prompt:", output.prompt_logprobs[0], len(output.prompt_logprobs) == len(output.prompt_token_ids))
