"""Different parameters for every prompt of one batch, and several answers to one prompt."""

from nanoinfer import LLM, SamplingParams

llm = LLM()
duck, goat = (llm.get_tokenizer().encode(word)[0] for word in (" duck", " goat"))
prompt = "Once upon a time, there was a"
params = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "careful": SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24),
    "wild": SamplingParams(temperature=2.0, min_p=0.02, seed=1, max_tokens=24),
    "no goats": SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24, bad_words=[[goat]]),
    "likes ducks": SamplingParams(temperature=0, max_tokens=24, logit_bias={duck: 3.0}),
    "until a full stop": SamplingParams(seed=3, stop=["."], include_stop_str_in_output=True, max_tokens=100),
    "three answers": SamplingParams(n=3, seed=5, max_tokens=8),
}
outputs = llm.generate([prompt] * len(params), list(params.values()), use_tqdm=False)
for name, output in zip(params, outputs, strict=True):
    for answer in output.outputs:
        print(f"{name:>18}: {prompt}{answer.text}")
