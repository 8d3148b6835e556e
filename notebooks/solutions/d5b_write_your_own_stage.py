"""Solutions of notebook d5b."""

import torch
from definitions import definitions

from nanoinfer import LLM, SamplingParams
from nanoinfer.sampling.sampler import STAGES

notebook = definitions("d5b_write_your_own_stage")
llm = LLM(device="cpu", kv_cache_memory=2**26)
tokenizer = llm.get_tokenizer()

# Exercise 1: a logits processor that ends the text after three sentences
(full_stop,) = tokenizer.encode(".")
ends = torch.tensor(sorted(llm.engine.eos_token_ids))


def end_after_three(prompt_ids, output_ids, logits):
    if list(output_ids).count(full_stop) < 3:
        return logits
    only_end = torch.full_like(logits, float("-inf"))
    only_end[ends] = logits[ends]
    return only_end


params = SamplingParams(temperature=0.7, seed=3, max_tokens=200, logits_processors=[end_after_three])
answer = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
print(repr(answer.text), answer.finish_reason)
# max_tokens would cut a sentence in the middle. stop="." would end at the first full stop, and drop it.
assert answer.text.count(".") == 3
assert answer.text.endswith(".")
assert answer.finish_reason == "stop"


# Exercise 2: epsilon sampling, before the temperature and after it
def keep_above_epsilon(logits, batch, epsilon=0.01):
    probabilities = logits.softmax(dim=-1)
    too_small = (probabilities < epsilon) & (logits < logits.amax(dim=-1, keepdim=True))
    return logits.masked_fill(too_small, float("-inf"))


at = [stage.__name__ for stage in STAGES].index("apply_temperature")
num_right = {}
for name, place in (("before", at), ("after", at + 1)):
    with_stage = LLM(device="cpu", kv_cache_memory=2**26, stages=[*STAGES[:place], keep_above_epsilon, *STAGES[place:]])
    num_right[name] = notebook.right_stories(with_stage, 3.0)
    print(f"{name} the temperature: right stories of 16: {num_right[name]}")
# Before the temperature, epsilon cuts the model's own tail, and what is left is good at any temperature. After it, the
# temperature has lifted parts of the tail above epsilon, and where nothing is above it, only the likeliest token stays.
assert num_right["before"] > num_right["after"]
