"""Many prompts at once: the engine batches them, and starts the next prompt as soon as a sequence ends."""

from nanoinfer import LLM, SamplingParams

heroes = ["Lily", "Ben", "Mia", "Tom", "Rosie", "Sam", "Anna", "Max"]
prompts = [f"Once upon a time, there was a kind child named {hero}." for hero in heroes]

llm = LLM()  # the bundled model, or LLM("gpt2"), LLM("Qwen/Qwen3-0.6B"), LLM("path/to/a/folder")
outputs = llm.generate(prompts, SamplingParams(temperature=0.7, max_tokens=40))  # without a seed, each request draws one

for output in outputs:
    answer = output.outputs[0]
    print(f"{output.prompt}{answer.text} [{len(answer.token_ids)} tokens, {answer.finish_reason}]\n")
