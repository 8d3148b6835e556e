"""Solutions of notebook 07."""

import torch
from definitions import definitions

from nanoinfer import LLM, SamplingParams
from nanoinfer.sampling.stages import keep_min_p, keep_top_k, keep_top_p
from nanoinfer_lab import stories

notebook = definitions("07_the_sampler_stage_by_stage")
p = torch.tensor([0.35, 0.22, 0.15, 0.10, 0.08, 0.05, 0.03, 0.02])
sharp = torch.tensor([0.92, 0.025, 0.016, 0.012, 0.010, 0.008, 0.005, 0.004])
flat = torch.tensor([0.14, 0.13, 0.13, 0.12, 0.12, 0.12, 0.12, 0.12])


def kept(stage, q, **params):
    return (notebook.after(stage, q, **params) > 0).tolist()


# Exercise 1: a min_p that keeps what top_p=0.8 keeps, and one for top_k=3
# top_p=0.8 keeps four words. min_p must lie between the ratios of the fifth and the fourth to the first: .08/.35 and .10/.35.
assert kept(keep_min_p, p, min_p=0.25) == kept(keep_top_p, p, top_p=0.8)
assert kept(keep_min_p, p, min_p=0.35) == kept(keep_top_k, p, top_k=3)  # between .10/.35 and .15/.35
limits = {name: (q[3] / q[0], q[2] / q[0]) for name, q in (("sharp", sharp), ("flat", flat))}
for name, (low, high) in limits.items():
    print(f"{name}: min_p above {low:.4f} and at most {high:.4f} keeps three")
# The two ranges do not meet, so there is no single min_p for both: a rank does not know how likely the third token is.
assert limits["sharp"][1] < limits["flat"][0]

# Exercise 2: a negative presence penalty on the repeating stories
llm = LLM(device="cpu", max_num_seqs=256, kv_cache_memory=2**26)
shares = []
for penalty in (0.0, -1.0):
    params = SamplingParams(temperature=0, max_tokens=360, ignore_eos=True, skip_special_tokens=False, presence_penalty=penalty)
    ids = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids
    runs = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    shares.append(1 - len(set(runs)) / len(runs))
    print(f"presence_penalty {penalty}: {shares[-1]:.0%} of the runs of four tokens are repeated")
# It rewards what was there before, so the text repeats itself at least as much.
assert shares[1] >= shares[0]

# Exercise 3: a fixed k in the grid of temperatures
temperatures, num_stories = (0.3, 0.7, 1.0, 1.5), 12
asked = [SamplingParams(temperature=t, top_k=5, seed=seed, max_tokens=200) for t in temperatures for seed in range(num_stories)]
answers = llm.generate(["Once"] * len(asked), asked, use_tqdm=False)
right = [stories.read("Once" + answer.outputs[0].text).is_complete for answer in answers]
for i, t in enumerate(temperatures):
    print(f"temperature {t}, top_k 5: right {sum(right[i * num_stories : (i + 1) * num_stories]) / num_stories:.0%}")
# Near "no cut" at a high temperature: where the model is sure, four wrong tokens stay, and the temperature lifts them. And
# where sixteen kinds of hero are good, eleven are lost. A number of tokens fits neither case.
assert sum(right[:num_stories]) > sum(right[-num_stories:])
