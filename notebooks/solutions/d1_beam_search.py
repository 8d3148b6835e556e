"""Solutions of notebook d1."""

from definitions import definitions

from nanoinfer import LLM, BeamSearchParams, Recorder, SamplingParams

notebook = definitions("d1_beam_search")
notebook.llm = llm = LLM(device="cpu", block_size=4, kv_cache_memory=2**26)
notebook.tokenizer = tokenizer = llm.get_tokenizer()

# Exercise 1: a prompt for which greedy is exact
for prompt, num_tokens in (("Once", 5), (notebook.START + " One sunny day,", 4), (notebook.START, 10)):
    ids, logprobs = notebook.greedy(prompt, num_tokens)
    best_ids, best, _ = notebook.exact(prompt, num_tokens)
    print(f"...{prompt[-20:]!r}{tokenizer.decode(ids)!r}: greedy {sum(logprobs):.3f}, exact {best:.3f}")
    if prompt == "Once":
        assert ids == best_ids
# In such texts the model is sure at every token, or the first choice costs so much that no other start can make up for it.
# Greedy fails where an unlikely token makes the rest certain.
assert ids != best_ids

# Exercise 2: blocks of 1, 4 and 16 tokens
for block_size in (1, 4, 16):
    recorder = Recorder()
    one = LLM(device="cpu", tracer=recorder, block_size=block_size, kv_cache_memory=2**26)
    one.beam_search(notebook.START, BeamSearchParams(beam_width=8, max_tokens=24, ignore_eos=True))
    used, _, copies = notebook.replay(recorder)
    print(f"blocks of {block_size:2}: {copies:2} copies, at most {max(used) * block_size} slots")
    assert (copies == 0) == (block_size == 1)
# A block of one token is full as soon as it is written, so nothing is copied, and no slot is empty. Larger blocks are copied
# more often and waste more. But every block is an entry in a table that is kept and followed, so engines choose 16 or more.

# Exercise 3: the best of 16 samples
params = SamplingParams(n=16, temperature=0.7, seed=0, max_tokens=10, ignore_eos=True, logprobs=0)
answers = llm.generate(notebook.START, params, use_tqdm=False)[0].outputs
# cumulative_logprob is the model's own, without the temperature, so it can be compared.
best = max(answers, key=lambda answer: answer.cumulative_logprob)
exact = notebook.exact(notebook.START, 10)[1]
print(f"best of 16: {best.cumulative_logprob:.3f} {best.text!r}; exact {exact:.3f}")
# Both compute 16 tokens per step. Beams drop what looks bad and share what they have in common, samples go on with everything,
# and differ more.
assert best.cumulative_logprob <= exact + 1e-4
