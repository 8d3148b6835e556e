"""Random requests, together and then each alone: tokens and log-probabilities must have the same bits where the engine says so.

    python -m tests.random_run --requests 2000 --seed 1 --dtype bfloat16 --family gpt2

The model has random weights and the width of a small real one. Requests arrive in the middle of others' answers. Neither prefix
hits nor preemptions occur, since those may change bits. With --speculative, drafts are made together, and none alone. Exit code
1 if a request differs, or if a block is not free at the end.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny_models

from nanoinfer import LLM, SamplingParams

ONE_LAYER = {"gpt2": {"n_layer": 1}, "qwen3": {"num_hidden_layers": 1}}


def random_request(rng):
    num_ids = rng.choice([3, tiny_models.VOCAB_SIZE])  # few: a text that repeats itself
    prompt = [rng.randrange(num_ids) for _ in range(rng.choice([1, 2, 3, rng.randrange(1, 131)]))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        seed=rng.randrange(2**32),
        max_tokens=rng.randrange(1, 13),
        logprobs=rng.choice([0, 3]),
        detokenize=False,
    )
    return prompt, params


def speculative_config(method, path):
    """Settings with which many drafts are made, and many accepted."""
    if method == "draft_model":
        return {"method": method, "model": str(path), "num_speculative_tokens": 3, "adaptive": False}
    return {"method": method, "prompt_lookup_min": 1, "adaptive": False}


def answer_of(request):
    answer = request.output.outputs[0]
    return answer.token_ids, [{i: entry.logprob for i, entry in position.items()} for position in answer.logprobs]


def run(llm, requests, rng):
    """The answers, in the requests' order. rng: when they arrive; None is all at once."""
    waiting, begun = list(reversed(requests)), []
    while waiting or llm.engine.num_unfinished:
        num_new = len(waiting) if rng is None else rng.randrange(6)
        for _ in range(min(num_new, len(waiting), 64 - llm.engine.num_unfinished)):
            prompt, params = waiting.pop()
            begun.append(llm.engine.add_request(prompt, params))
        llm.engine.step()
    return [answer_of(request) for request in begun]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--family", choices=tiny_models.WIDE, default="gpt2")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--speculative", choices=["ngram", "draft_model"])
    given = parser.parse_args(arguments)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.save(given.family, Path(folder), **tiny_models.WIDE[given.family], **ONE_LAYER[given.family])
        settings = {"dtype": given.dtype, "kv_cache_memory": 2**27, "enable_prefix_caching": False}
        llm = alone_llm = LLM(path, enforce_eager=given.enforce_eager, **settings)
        if given.speculative:
            speculation = speculative_config(given.speculative, path)
            llm = LLM(path, enforce_eager=given.enforce_eager, speculative_config=speculation, **settings)
        requests = [random_request(rng) for _ in range(given.requests)]
        together = run(llm, requests, rng)
        alone = [run(alone_llm, [request], None)[0] for request in requests]
        different = sum(one != other for one, other in zip(together, alone, strict=True))
        tiny_models.assert_nothing_is_left(llm)
        promised = "the same bits" if llm.batch_independent else "nothing"
        print(f"{given.requests} requests in {given.dtype}, {given.family}: {different} differ, {promised} promised")
        if given.speculative:
            print(llm.engine.speculator.metrics)
    return 1 if different and promised == "the same bits" else 0


if __name__ == "__main__":
    sys.exit(main())
