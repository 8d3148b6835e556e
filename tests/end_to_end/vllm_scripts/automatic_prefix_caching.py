"""Two questions about one long table: the second finds the table in the cache."""

import time

from vllm import LLM, SamplingParams

table = "| name | age |\n|---|---|\n" + "".join(f"| {name} | {age} |\n" for age, name in enumerate(["Lily", "Ben", "Max"] * 6))


def generate_and_time(llm, sampling_params, prompt):
    start = time.time()
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    print(f"Output: {outputs[0].outputs[0].text}\nCached: {outputs[0].num_cached_tokens > 0}")
    assert time.time() >= start


def main():
    llm = LLM(model="tiny-qwen3", enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=10)
    generate_and_time(llm, sampling_params, table + "Question: how old is Lily? Answer: ")
    generate_and_time(llm, sampling_params, table + "Question: how old is Ben? Answer: ")


if __name__ == "__main__":
    main()
