"""Sample answers under load, and count the tokens on which the trainer's ratio is not exactly 1. Exit code 1 if there are any.

    python -m tests.ratio_under_load --answers 1000 --dtype bfloat16

Prompts share beginnings, and there are too few blocks for all of them. So n, top-p, top-k, penalties, chunks, preemptions and
prefix hits change which tokens are drawn and in which company, and must change no log-probability.
"""

import argparse
import random
import sys
from itertools import islice

import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.features.policy.policy import Policy

KINDS = [
    {},
    {"top_p": 0.8},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"top_k": 5, "temperature": 0.8},
    {"min_p": 0.05, "presence_penalty": 0.5},
]


def sample(llm, rng, num_prompts, num_ids, longest):
    """Two answers to each of some random prompts."""
    shared = [rng.randrange(num_ids) for _ in range(longest)]
    prompts = [
        shared[: rng.randrange(1, longest)] + [rng.randrange(num_ids) for _ in range(rng.randrange(1, longest // 2))]
        for _ in range(num_prompts)
    ]
    params = [
        SamplingParams(
            n=2, logprobs=0, max_tokens=longest // 2, ignore_eos=True, seed=i, detokenize=False, **KINDS[i % len(KINDS)]
        )
        for i in range(num_prompts)
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def answers_of(outputs):
    return [(one.prompt_token_ids + answer.token_ids, answer) for one in outputs for answer in one.outputs]


def ratios(answers, found):
    """The ratio of each sampled token. found: what the policy says of the answers."""
    for (_, answer), new in zip(answers, found, strict=True):
        old = [entry[i].logprob for entry, i in zip(answer.logprobs, answer.token_ids, strict=True)]
        yield from (new[-len(old) :].detach().double() - torch.tensor(old, dtype=torch.float64)).exp().tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = {"kv_cache_memory": 2**22, "chunk_size": 64, "max_num_batched_tokens": 256, "max_model_len": 256}
    policy, found = Policy(args.model, args.dtype), []
    with LLM(args.model, dtype=args.dtype, batch_invariant=True, **settings) as llm:
        outputs = sample(llm, random.Random(args.seed), -(-args.answers // 2), num_ids=1000, longest=80)
    answers = answers_of(outputs)
    remaining = iter(answers)
    with torch.no_grad():
        while batch := list(islice(remaining, 50)):
            found += policy([ids for ids, _ in batch])
    all_ratios = list(ratios(answers, found))
    num_wrong = sum(ratio != 1 for ratio in all_ratios)
    print(
        f"{args.dtype}: {len(answers)} answers with {len(all_ratios)} tokens, "
        f"{sum(one.metrics.num_preemptions for one in outputs)} preemptions, "
        f"{sum(one.num_cached_tokens for one in outputs)} prefix hits in tokens; ratio not 1 on {num_wrong}"
    )
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
