"""The same seed gives the same answers."""

import os

from vllm import LLM, SamplingParams

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
prompts = ["Once upon a time", "Lily was", "There was a kind duck", "One day, Tom"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    runs = []
    for _ in range(2):
        llm = LLM(model="tiny-qwen3", seed=42)
        runs.append([output.outputs[0].text for output in llm.generate(prompts, sampling_params)])
    print("Same texts:", runs[0] == runs[1], len(set(runs[0])))


if __name__ == "__main__":
    main()
