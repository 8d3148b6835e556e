"""Train tiny-qwen3 by GRPO to write stories that count, with the engine as sampler and its kernels in the trainer.

For each prompt, a group of answers is sampled. An answer's advantage is its reward, less the mean of its group, divided by the
group's standard deviation. The loss is -min(ratio * advantage, clipped ratio * advantage), where the ratio is that of the new
probability of each token to the one it was sampled with. The sampler and the trainer compute with the same kernels, so the
ratio is exactly 1 before the first step of each round, in any batch, and no correction for a mismatch is needed.

Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, with the mean over all tokens of Liu et al. 2025,
https://arxiv.org/abs/2503.20783. Notebook d8 explains each part.
"""

import argparse
import os
from collections.abc import Iterator

import torch

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.features.policy.policy import Policy
from nanoinfer_lab import stories

PROMPTS = ["Once upon a time", "Lily was", "Once there lived", "Long ago", "Far away", "Max was", "Anna was", "Tom was"]


def reward(story: str) -> float:
    """1 for a whole story without a mistake in which something is counted: the grammar remembers the number. Otherwise 0."""
    reading = stories.read(story)
    return float(reading.is_complete and "n" in reading.memory)


def sample(llm: LLM, answers: int) -> list[RequestOutput]:
    """A group of answers to each prompt, with the log-probabilities that their tokens were drawn with."""
    params = SamplingParams(n=answers, max_tokens=200, logprobs=0)
    return llm.generate(PROMPTS, params, use_tqdm=False)


def rewards_of(groups: list[RequestOutput]) -> torch.Tensor:
    """[groups, answers]"""
    return torch.tensor([[reward(group.prompt + one.text) for one in group.outputs] for group in groups])


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[groups, answers] -> the same: how much better an answer is than its group, in standard deviations."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def old_logprobs(groups: list[RequestOutput]) -> list[torch.Tensor]:
    """The sampler's log-probabilities of each answer's tokens."""
    return [
        torch.tensor([entry[token_id].logprob for entry, token_id in zip(one.logprobs, one.token_ids, strict=True)])
        for group in groups
        for one in group.outputs
    ]


def new_logprobs(policy: Policy, groups: list[RequestOutput]) -> list[torch.Tensor]:
    """The trainer's log-probabilities of the same tokens, with gradients."""
    answers = [(group.prompt_token_ids, one.token_ids) for group in groups for one in group.outputs]
    found = policy([prompt + answer for prompt, answer in answers])
    return [logprobs[-len(answer) :] for logprobs, (_, answer) in zip(found, answers, strict=True)]


def loss_of(ratio: torch.Tensor, advantage: torch.Tensor, clip: float = 0.2) -> torch.Tensor:
    """The clipped policy gradient. [tokens]: the ratio of each token, and the advantage of its answer."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def train(llm: LLM, policy: Policy, rounds: int, answers: int = 8) -> Iterator[float]:
    """Yield the mean reward of each round's answers, which were sampled before its two steps."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    for _ in range(rounds):
        groups = sample(llm, answers)
        rewards, old = rewards_of(groups), old_logprobs(groups)
        advantage = advantages(rewards).flatten().repeat_interleave(torch.tensor([len(one) for one in old]))
        for step in range(2):
            ratio = (torch.cat(new_logprobs(policy, groups)) - torch.cat(old)).exp()
            assert step > 0 or bool((ratio == 1).all()), "the trainer has the sampler's bits"
            optimizer.zero_grad()
            loss_of(ratio, advantage).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        llm.update_weights(policy.weights())
        yield rewards.mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("ROUNDS", "24")))
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    with LLM("tiny-qwen3", dtype=args.dtype, batch_invariant=True, seed=args.seed, kv_cache_memory=2**27) as llm:
        policy = Policy("tiny-qwen3", args.dtype)
        for number, mean in enumerate(train(llm, policy, args.rounds, args.answers)):
            print(f"round {number}: reward {mean:.3f}", flush=True)
