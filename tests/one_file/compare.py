"""Ask one_file/engine.py and the package the same requests, and count the answers that differ.

    python -m tests.one_file.compare [NUMBER] [SEED]     NUMBER requests, divided among FAMILIES: 500 take 15 seconds

The checkpoints are random, with a byte-level tokenizer. The parameters are mixed, and many prompts have the same beginning. The
one file has blocks of 4 tokens, chunks of 8 and few blocks, so that it preempts. The package has its defaults and no compiler.
Exit code 1: an answer differs.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from nanoinfer import LLM, SamplingParams
from tests.helpers import tiny_models
from tests.helpers.tokenizer_files import byte_level
from tests.one_file.module import load

FAMILIES = ("gpt2", "gpt2_untied", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied")
EOS, SECOND_EOS = 7, 9  # of config.json, and of generation_config.json alone
SMALL = {"block_size": 4, "num_blocks": 24, "chunk_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 8}
PACKAGE = {"dtype": "float32", "enforce_eager": True, "attention_backend": "reference", "kv_cache_memory": 2**24}

Request = tuple[list[int] | str, dict[str, Any]]  # a prompt, and the parameters of its answers


def save(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a checkpoint with a tokenizer. Qwen's weights stand in several files."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>"])
    size = tokenizer.get_vocab_size()
    model = tiny_models.build(family, vocab_size=size, eos_token_id=EOS, **overrides)
    model.generation_config.eos_token_id = [EOS, SECOND_EOS]
    model.save_pretrained(folder, max_shard_size="1GB" if family.startswith("gpt2") else "60KB")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == EOS
    return folder


def requests(number: int, seed: int = 0) -> list[Request]:
    """Draw prompts, of which many have a common beginning, and their parameters."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(256) for _ in range(rng.randrange(8, 40))] for _ in range(3)]
    return [
        ([*rng.choice([[], *beginnings]), *(rng.randrange(256) for _ in range(rng.randrange(1, 20)))], some_params(rng, i))
        for i in range(number)
    ]


def some_params(rng: random.Random, seed: int) -> dict[str, Any]:
    """Draw the parameters of a request: a third is greedy, and each other parameter is in a third of the requests."""
    params = {"temperature": rng.choice((0.0, 0.7, 1.3)), "max_tokens": rng.randrange(1, 25), "seed": seed}
    values = {
        "n": rng.randrange(2, 4), "top_k": rng.randrange(1, 60), "top_p": rng.choice((0.2, 0.5, 0.9)),
        "min_p": rng.choice((0.01, 0.1)), "repetition_penalty": rng.choice((0.8, 1.3)),
        "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2),
        "min_tokens": rng.randrange(params["max_tokens"] + 1),
        "stop": rng.choice(("e", ["th", "a", "he"], ["r", "<|im_start|>"])),
        "stop_token_ids": rng.sample(range(264), 20), "ignore_eos": True,
    }  # fmt: skip
    params |= {name: value for name, value in values.items() if rng.random() < 1 / 3}
    return params | ({"n": 1} if params["temperature"] == 0 else {})


def facts(outputs: Any) -> list[list[tuple[Any, ...]]]:
    """Return what is compared of each answer of each request."""
    return [
        [(answer.text, list(answer.token_ids), answer.finish_reason, answer.stop_reason) for answer in output.outputs]
        for output in outputs
    ]


def answers_of_package(folder: Path, asked: list[Request], **settings: Any) -> list[list[tuple[Any, ...]]]:
    prompts, params = [prompt for prompt, _ in asked], [SamplingParams(**params) for _, params in asked]
    with LLM(folder, **PACKAGE | settings) as llm:
        return facts(llm.generate(prompts, params, use_tqdm=False))


def answers_of_file(engine: ModuleType, folder: Path, asked: list[Request], **settings: Any) -> Any:
    """Return the file's answers, and how often it preempted a sequence and found a cached block."""
    counts: Counter[str] = Counter()
    preempt, match_prefix = engine.Scheduler._preempt, engine.BlockManager.match_prefix

    def preempting(scheduler: Any, sequence: Any) -> None:
        counts["preemptions"] += 1
        preempt(scheduler, sequence)

    def matching(manager: Any, *args: Any) -> Any:
        counts["blocks found"] += len(found := match_prefix(manager, *args))
        return found

    with (
        mock.patch.object(engine.Scheduler, "_preempt", preempting),
        mock.patch.object(engine.BlockManager, "match_prefix", matching),
    ):
        llm = engine.LLM(folder, device="cpu", dtype="float32", **SMALL | settings)
        outputs = llm.generate([prompt for prompt, _ in asked], [engine.SamplingParams(**params) for _, params in asked])
    assert_nothing_is_left(llm)
    return facts(outputs), counts


def assert_nothing_is_left(llm: Any) -> None:
    """Assert that no block is held and nobody waits."""
    scheduler = llm.scheduler
    assert set(scheduler.block_manager.blocks.ref_counts) == {0}
    assert not scheduler.waiting
    assert not scheduler.running
    assert not llm.answers


def main(number: int = 500, seed: int = 0) -> int:
    """Compare, print and return the number of requests with other answers."""
    torch.set_num_threads(1)  # more are slower with matrices this small
    engine, num_different = load(), 0
    for index, family in enumerate(FAMILIES):
        with tempfile.TemporaryDirectory() as name:
            folder, asked = save(family, Path(name)), requests(-(-number // len(FAMILIES)), seed + index)
            expected = answers_of_package(folder, asked)
            got, counts = answers_of_file(engine, folder, asked)
        different = [i for i in range(len(asked)) if expected[i] != got[i]]
        num_different += len(different)
        print(f"{family}: {len(different)} of {len(asked)} requests have other answers, with {dict(counts)}", flush=True)
        for i in different[:3]:
            print(f"  {asked[i]}\n    the package:  {expected[i]}\n    the one file: {got[i]}")
    return num_different


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
