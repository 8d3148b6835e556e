"""A conversation: the checkpoint's chat template turns messages into a prompt."""

from nanoinfer import LLM, SamplingParams

llm = LLM()
params = SamplingParams(temperature=0.7, seed=2, max_tokens=200)
messages = []
for question in ("Tell me a story about Lily", "Tell me a story about Tom"):
    messages.append({"role": "user", "content": question})
    # The earlier turns are in the cache, and only the new ones are computed. num_cached_tokens counts the cached ones.
    output = llm.chat(messages, params, use_tqdm=False)[0]
    answer = output.outputs[0].text
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}")
    print(f"[{len(output.prompt_token_ids)} tokens of prompt, {output.metrics.num_cached_tokens} of them from the cache]\n")
