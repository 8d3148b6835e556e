"""A model on three ranks. vLLM's example is started by torchrun, which nanoinfer does not need."""

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(
        model="tiny-qwen3", tensor_parallel_size=3, pipeline_parallel_size=1, distributed_executor_backend="external_launcher"
    )
    for output in llm.generate(["Once upon a time", "Lily was"], sampling_params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
    llm.close()
