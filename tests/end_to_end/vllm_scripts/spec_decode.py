"""Speculative decoding with n-grams, and its metrics."""

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.metrics.reader import Counter, Vector

NUM_SPEC_TOKENS = 3


def main():
    llm = LLM(
        model="tiny-qwen3",
        trust_remote_code=True,
        tensor_parallel_size=1,
        enable_chunked_prefill=False,
        enforce_eager=True,
        gpu_memory_utilization=0.8,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": NUM_SPEC_TOKENS,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
        disable_log_stats=False,
        max_model_len=256,
        limit_mm_per_prompt={},
        disable_chunked_mm_input=True,
    )
    text = "The duck met the fox. The fox met the duck. " * 4
    prompt_ids = [llm.get_tokenizer().encode(text, add_special_tokens=False)]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in prompt_ids]
    outputs = llm.generate(prompts, sampling_params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    print("Output tokens:", sum(len(output.outputs[0].token_ids) for output in outputs))

    num_drafts = num_draft_tokens = num_accepted = 0
    acceptance_counts = [0] * NUM_SPEC_TOKENS
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            num_accepted += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for position, value in enumerate(metric.values):
                acceptance_counts[position] += value
    print("Consistent:", sum(acceptance_counts) == num_accepted <= num_draft_tokens <= NUM_SPEC_TOKENS * num_drafts)


if __name__ == "__main__":
    main()
