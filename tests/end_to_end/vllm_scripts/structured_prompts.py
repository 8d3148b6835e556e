"""Every request with its own parameters; prompts as dicts with vLLM's further keys."""

from vllm import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM(model="tiny-gpt2", max_num_batched_tokens=None, enable_chunked_prefill=True, seed=7)
prompts = [
    "Once upon a time",
    TextPrompt(prompt="Lily was", multi_modal_data=None),
    TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode("There was"), multi_modal_data=None, mm_processor_kwargs=None),
]
base = SamplingParams(max_tokens=6, structured_outputs=None, spaces_between_special_tokens=True, extra_args=None)
params = [base.clone() for _ in prompts]
for index, each in enumerate(params):
    each.seed = index
    each.temperature = 0.5 * index
outputs = llm.generate(prompts, params, priority=None)
for output in outputs:
    print(output.request_id, len(output.prompt_token_ids), len(output.outputs[0].token_ids), output.outputs[0].finish_reason)
