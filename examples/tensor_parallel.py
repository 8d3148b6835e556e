"""One model on two processes: each has half of every layer's weights. On a machine with two GPUs, each process has one.

    python examples/tensor_parallel.py                              starts the second process itself
    torchrun --nproc-per-node 2 examples/tensor_parallel.py         with processes of torchrun's, on several machines too

Everything after LLM() runs in one process only. The other one computes for it inside LLM(), and exits when this one ends.
"""

from nanoinfer import LLM, SamplingParams

llm = LLM("tiny-gpt2", tensor_parallel_size=2)
whole = LLM("tiny-gpt2")

params = SamplingParams(temperature=0, max_tokens=20)
[output] = llm.generate(["Once upon a time"], params, use_tqdm=False)
[expected] = whole.generate(["Once upon a time"], params, use_tqdm=False)
print(output.prompt + output.outputs[0].text)
print("the text of one process:", output.outputs[0].text == expected.outputs[0].text)

for name, one in {"one process": whole, "each of two": llm}.items():
    info = one.info
    print(f"{name}: {info.num_cache_bytes // info.num_blocks:,} bytes for {info.block_size} tokens in the KV cache")
