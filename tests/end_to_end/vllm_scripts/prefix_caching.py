"""A shared prefix with and without the prefix cache, and after a reset."""

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = "Once upon a time, there was a kind duck named Max. Every morning, he ate three pancakes for breakfast. " * 3
prompts = [prefix + ending for ending in ("One day, he", "His friend", "At night", "The rain")]
sampling_params = SamplingParams(temperature=0.0, max_tokens=10)


def main():
    regular = LLM(model="tiny-qwen3", gpu_memory_utilization=0.4, enable_prefix_caching=False, block_size=16)
    expected = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
    del regular
    cleanup_dist_env_and_memory()

    llm = LLM(model="tiny-qwen3", gpu_memory_utilization=0.4, enable_prefix_caching=True, block_size=16)
    llm.generate(prompts[0], sampling_params)  # the others find its prefix
    outputs = llm.generate(prompts, sampling_params)
    print("Same texts:", [output.outputs[0].text for output in outputs] == expected)
    print("Cached tokens:", [output.num_cached_tokens for output in outputs])
    print("Reset:", llm.reset_prefix_cache())
    print("Cached tokens after the reset:", llm.generate(prompts[0], sampling_params)[0].num_cached_tokens)


if __name__ == "__main__":
    main()
