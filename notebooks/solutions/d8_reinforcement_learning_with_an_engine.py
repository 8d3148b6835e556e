"""Solutions of notebook d8."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import grpo

from nanoinfer import LLM
from nanoinfer.features.policy.policy import Policy
from nanoinfer_lab import stories

llm = LLM("tiny-qwen3", dtype="float32", batch_invariant=True, seed=0, kv_cache_memory=2**26)
policy = Policy("tiny-qwen3", "float32")
groups = grpo.sample(llm, answers=8)


# Exercise 1: a reward that can be cheated
def num_numbers(text):
    return float(sum(text.count(f" {number}") for number in stories.NUMBERS))


rewards = torch.tensor([[num_numbers(groups[0].prompt + one.text) for one in groups[0].outputs]])
print(
    "number words:",
    *(f"{reward:.0f} ({its:+.1f})" for reward, its in zip(rewards[0], grpo.advantages(rewards)[0], strict=True)),
)
cheat = "Once upon a time" + " two" * 30
assert num_numbers(cheat) > rewards.max()
assert grpo.reward(cheat) == 0
print(f"the cheat has {num_numbers(cheat):.0f}, and the grammar expected {stories.read(cheat).expected[0]!r} after 'time'")
# Training would find such texts, since every token " two" raises the reward. A rule has to say what it does not want.


# Exercise 2: the KL term
def kl(new, first):
    """The estimator of Schulman (http://joschu.net/blog/kl-approx.html), whose mean is the KL divergence. [tokens]"""
    d = first.double() - new.double()
    return d.exp() - d - 1  # never negative: exp(d) lies above its tangent at zero, 1 + d


old = grpo.old_logprobs(groups)
texts = [group.prompt_token_ids + one.token_ids for group in groups for one in group.outputs]
first = torch.cat([torch.tensor(found[-len(its) :]) for found, its in zip(llm.compute_logprobs(texts), old, strict=True)])
advantage = grpo.advantages(grpo.rewards_of(groups)).flatten().repeat_interleave(torch.tensor([len(one) for one in old]))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
new = torch.cat(grpo.new_logprobs(policy, groups))
grpo.loss_of((new - torch.cat(old)).exp(), advantage).backward()
optimizer.step()
after = torch.cat(grpo.new_logprobs(policy, groups))
before_it, after_it = kl(new, first), kl(after, first)
print(f"KL before the step {before_it.mean():.1e}, after it {after_it.mean():.1e}, smallest {after_it.min():.1e}")
assert before_it.max() == 0  # the engine's numbers are the policy's, bit by bit
assert after_it.mean() > 0

# Exercise 3: without the division
print("rewarded of 8   with   without")
for good in (1, 4, 7):
    row = torch.tensor([[1.0] * good + [0.0] * (8 - good)])
    with_it, without = grpo.advantages(row).abs().sum(), (row - row.mean()).abs().sum()
    print(f"{good:13} {with_it:6.1f} {without:9.1f}")
# Divided, a group with one good answer weighs two thirds of an even one. Not divided, it weighs less than half of it. So groups
# that are nearly always right or wrong lose weight, and even ones gain it. (Dr. GRPO leaves the division out.)
