"""Four prompts, one set of parameters."""

from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "Lily was", "There was a kind duck", "One day, Tom"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="tiny-qwen3")
    outputs = llm.generate(prompts, sampling_params)
    print("\nGenerated Outputs:\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}\nOutput: {generated_text!r}")


if __name__ == "__main__":
    main()
