"""After vLLM's example sleep_mode."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="tiny-qwen3", enable_sleep_mode=True, seed=0)
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("How are you?", params)[0].outputs[0].text
    llm.sleep(level=1)
    llm.wake_up()
    after = llm.generate("How are you?", params)[0].outputs[0].text
    print(f"Same text: {before == after}")


if __name__ == "__main__":
    main()
