"""Structured outputs as scripts for earlier versions of vLLM write them, and token ids as their own argument."""

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

llm = LLM(model="tiny-qwen3")
guided = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["Positive", "Negative"]), max_tokens=20)
print("Choice:", llm.generate("Is the duck kind? ", guided)[0].outputs[0].text)

token_ids = [llm.get_tokenizer().encode(text) for text in ("Once upon a time", "Lily was")]
outputs = llm.generate(prompt_token_ids=token_ids, sampling_params=SamplingParams(temperature=0, max_tokens=5))
print("Same ids:", [output.prompt_token_ids for output in outputs] == token_ids)
