"""Train tiny-qwen3 by GRPO to write stories that a rule rewards, with the engine as sampler and its kernels in the trainer.

For each prompt, a group of answers is sampled. An answer's advantage is its reward, less the mean of its group, divided by the
group's standard deviation. The loss is -min(ratio * advantage, clipped ratio * advantage), where the ratio is that of the new
probability of each token to the one it was sampled with. The sampler and the trainer compute with the same kernels, so the
ratio is exactly 1 before the first step of each round, in any batch, and no correction for a mismatch is needed.

Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, with the mean over all tokens of Liu et al. 2025,
https://arxiv.org/abs/2503.20783.
"""

import argparse
import os

import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.training.policy import Policy

PROMPTS = ["Once upon a time", "Lily was", "One day, Tom", "Max and Ben", "In a small village", "The little fox"]


def reward(text: str) -> float:
    """1 for a story of short sentences: the share of its sentences that have at most six words."""
    sentences = [part.split() for part in text.replace("!", ".").replace("?", ".").split(".") if part.strip()]
    return sum(len(words) <= 6 for words in sentences) / max(len(sentences), 1)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[groups, answers] -> the same: how much better an answer is than its group, in standard deviations."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def loss_of(new: list[torch.Tensor], old: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """The clipped policy gradient. new, old: the log-probabilities of each answer's tokens. weights: the advantages."""
    ratio = (torch.cat(new) - torch.cat(old)).exp()
    advantage = weights.repeat_interleave(torch.tensor([len(one) for one in old]))
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def train(rounds: int, answers: int, tokens: int, seed: int = 0, dtype: str = "float32") -> list[float]:
    """Return the mean reward of each round's answers."""
    llm = LLM("tiny-qwen3", dtype=dtype, batch_invariant=True, seed=seed, kv_cache_memory=2**27)
    policy = Policy("tiny-qwen3", dtype)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0)
    means = []
    for number in range(rounds):
        params = SamplingParams(n=answers, max_tokens=tokens, logprobs=0, seed=seed + number * answers)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        rewards = torch.tensor([[reward(one.text) for one in output.outputs] for output in outputs])
        means.append(rewards.mean().item())
        ids = [output.prompt_token_ids + one.token_ids for output in outputs for one in output.outputs]
        old = [
            torch.tensor([entry[token_id].logprob for entry, token_id in zip(one.logprobs, one.token_ids, strict=True)])
            for output in outputs
            for one in output.outputs
        ]
        weights = advantages(rewards).flatten()
        for step in range(2):
            new = [found[-len(its_old) :] for found, its_old in zip(policy(ids), old, strict=True)]
            if step == 0:
                assert torch.equal(torch.cat(new), torch.cat(old)), "the trainer has the sampler's bits"
            optimizer.zero_grad()
            loss_of(new, old, weights).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        version = llm.update_weights(policy.weights())
        print(f"round {number}: reward {means[-1]:.3f}, weights {version}")
    llm.close()
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("ROUNDS", "30")))
    parser.add_argument("--answers", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    train(args.rounds, args.answers, args.tokens, args.seed, args.dtype)
