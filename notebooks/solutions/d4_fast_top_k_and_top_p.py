"""Solutions of notebook d4."""

import random
from unittest.mock import patch

import torch
from definitions import definitions

from nanoinfer import SamplingParams
from nanoinfer.fast.sampling import few_logits
from nanoinfer.sampling import stages

notebook = definitions("d4_fast_top_k_and_top_p")

# Exercise 1: no margin for ties
rounded = (torch.randn(512, 1000, generator=torch.Generator().manual_seed(1)) * 3).round().clamp(-4, 4)
ordinary = torch.randn(512, 1000, generator=torch.Generator().manual_seed(2)) * 3
num_plain = {}
for kind, logits in (("ordinary", ordinary), ("nine values", rounded)):
    for margin in (few_logits.TIE_MARGIN, 0):
        rng = random.Random(0)
        params = [notebook.random_params(rng) for _ in range(len(logits))]
        for one in params:
            one.min_p = 0.0  # for min-p the largest 256 are fetched, far more than k + margin
        batch = notebook.batch_of(params, 1000)
        with patch.object(few_logits, "TIE_MARGIN", margin):
            num_same, num_plain[kind, margin] = notebook.both_ways(logits, batch)
        print(f"{kind:11} margin {margin:2}: {num_same} of {len(logits)} agree, {num_plain[kind, margin]} handed over")
        assert num_same == len(logits)
# They still agree: without a margin nothing shows that no further token ties, so more rows are handed over. The margin is for
# speed.
assert num_plain["ordinary", 0] > num_plain["ordinary", few_logits.TIE_MARGIN]

# Exercise 2: the temperature at which top-p 0.9 begins to need more than 256 tokens
ranks = torch.arange(1, 151_937, dtype=torch.float64)


def share_of_tried(temperature):
    falling = ranks ** (-2 / temperature)
    return (falling[: few_logits.NUM_TRIED].sum() / falling.sum()).item()


low, high = 1.0, 3.0
while high - low > 1e-4:
    middle = (low + high) / 2
    low, high = (middle, high) if share_of_tried(middle) >= 0.9 else (low, middle)
print(f"the 256 largest hold 90% up to temperature {low:.3f}")
logits = notebook.sure_logits(2, 151_936)
for temperature in (low - 0.02, low + 0.02):
    batch = notebook.batch_of([SamplingParams(temperature=temperature, top_p=0.9)] * 2, 151_936)
    num_same, handed_over = notebook.both_ways(logits, batch)
    print(f"temperature {temperature:.3f}: {handed_over} of 2 rows took the plain way")
    assert handed_over == (0 if temperature < low else 2)

# Exercise 3: top-p with float32 sums, on rows that are rounded to bfloat16
rows = (torch.randn(200, 50_257, generator=torch.Generator().manual_seed(0)) * 3).bfloat16().float()
batch = notebook.batch_of([SamplingParams(top_p=0.9)] * 200, 50_257)
exact = stages.keep_top_p(rows.clone(), batch) > -float("inf")
falling, ids = rows.sort(dim=-1, descending=True, stable=True)
probabilities = falling.softmax(dim=-1)
kept = probabilities.cumsum(dim=-1) - probabilities < 0.9
floats = torch.zeros_like(exact).scatter(-1, ids, kept)
num_differing = (exact != floats).sum(dim=-1)
num_rows, most = int((num_differing > 0).sum()), int(num_differing.max())
print(f"{num_rows} of 200 rows differ, by at most {most} tokens of {int(exact.sum(-1)[0])}")
# Thousands of tokens are kept here, and the float sum is wrong by a few units of its last place when it nears 0.9. Whether that
# is one token or several depends on how likely a token is there.
assert num_differing.max() < 0.01 * exact.sum(dim=-1).max()
