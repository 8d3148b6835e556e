"""Log-probabilities of each sampled token and its alternatives, and of a given text."""

from nanoinfer import LLM, SamplingParams

llm = LLM()
output = llm.generate("Lily was a", SamplingParams(temperature=0.7, seed=1, max_tokens=8, logprobs=3), use_tqdm=False)[0]
answer = output.outputs[0]
for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True):
    others = ", ".join(f"{one.decoded_token!r} {one.logprob:.2f}" for i, one in entries.items() if i != token_id)
    drawn = entries[token_id]
    print(f"{drawn.decoded_token!r:>12} {drawn.logprob:6.2f}, rank {drawn.rank}; others: {others}")
print(f"together {answer.cumulative_logprob:.2f}\n")

# prompt_logprobs scores a given text. The first token has no log-probability.
score = SamplingParams(max_tokens=1, prompt_logprobs=0)
texts = ["Once upon a time, there was a kind duck.", "Once upon a time, there was a duck kind."]
for output in llm.generate(texts, score, use_tqdm=False):
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    total = sum(entries[token_id].logprob for token_id, entries in pairs)
    print(f"{total:8.2f}  {output.prompt}")
