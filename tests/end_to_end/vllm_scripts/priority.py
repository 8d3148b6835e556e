"""Requests with priorities: the lowest runs first."""

from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "Lily was", "There was a kind duck"]


def main():
    llm = LLM(model="tiny-qwen3", scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8), priority=[2, 1, 0])
    first_tokens = [output.metrics.first_token_time for output in outputs]
    print("Order of the prompts:", sorted(range(3), key=first_tokens.__getitem__))


if __name__ == "__main__":
    main()
