"""Many prompts in one call, with the model's default parameters changed by assignment."""

from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "Lily was", "There was a kind duck", "One day, Tom"]


def main():
    llm = LLM(
        model="tiny-qwen3",
        tokenizer=None,
        runner="generate",
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="auto",
        seed=0,
        max_model_len=256,
        max_num_seqs=None,
        gpu_memory_utilization=0.5,
        swap_space=4,
        cpu_offload_gb=0,
        enforce_eager=False,
        generation_config="auto",
        hf_overrides=None,
        disable_log_stats=True,
    )
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 20
    sampling_params.top_p = 0.95
    outputs = llm.generate(prompts, sampling_params, use_tqdm=True, lora_request=None)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")

    same = llm.generate(prompts[0], SamplingParams(n=3, temperature=0.8, min_p=0.05, seed=1, max_tokens=8, stop=["."]))[0]
    print("Answers:", [answer.text for answer in same.outputs])


if __name__ == "__main__":
    main()
