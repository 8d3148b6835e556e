"""Functions that change the logits of one request: with and without the prompt's ids."""

import torch
from vllm import LLM, SamplingParams

llm = LLM(model="tiny-qwen3")
tokenizer = llm.get_tokenizer()
[wanted] = tokenizer.encode("!")


def only_exclamation_marks(output_token_ids, logits):
    if len(output_token_ids) < 3:
        mask = torch.full_like(logits, float("-inf"))
        mask[wanted] = 0.0
        return logits + mask
    return logits


def repeat_the_prompt(prompt_token_ids, output_token_ids, logits):
    logits[prompt_token_ids[len(output_token_ids) % len(prompt_token_ids)]] += 1000.0
    return logits


for processor in (only_exclamation_marks, repeat_the_prompt):
    params = SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[processor])
    print(f"{processor.__name__}: {llm.generate('Once upon a time', params)[0].outputs[0].text!r}")
