"""Drafts of a smaller model, and both kinds of drafts in the whole engine: the tokens stay those of plain decoding."""

import random

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import BACKENDS, PREFERRED
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.errors import CheckpointNotFoundError, InvalidTypeError, InvalidValueError
from tests import fuzz
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow

SMALL = {"kv_cache_memory": 2**20, "block_size": 8, "seed": 0}


def requests_of(rng, num):
    """Prompts that repeat themselves, and prompts that do not."""
    requests = []
    for i in range(num):
        num_ids = rng.choice([3, tiny_models.VOCAB_SIZE])
        prompt = [rng.randrange(num_ids) for _ in range(rng.randrange(1, 60))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 5]),
            min_tokens=rng.choice([0, 5]),
            stop_token_ids=[rng.randrange(tiny_models.VOCAB_SIZE)],
            max_tokens=rng.randrange(5, 40),
            logprobs=rng.choice([None, 2]),
            seed=i,
            detokenize=False,
        )
        requests.append((prompt, params))
    return requests


def answer(llm, requests):
    """The answers, and how often a sequence was preempted."""
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    tiny_models.assert_nothing_is_left(llm)
    answers = [(one.token_ids, one.finish_reason, one.stop_reason) for output in outputs for one in output.outputs]
    return answers, sum(output.metrics.num_preemptions for output in outputs)


@pytest.fixture(scope="module")
def expected(qwen3_path):
    """The answers of plain decoding."""
    return answer(LLM(qwen3_path, **SMALL), requests_of(random.Random(1), 20))[0]


@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(("method", "num"), [("ngram", 4), ("itself", 5), ("another model", 2)])
def test_the_tokens_are_those_of_plain_decoding(method, num, adaptive, expected, qwen3_path, gpt2_path):
    """With so few blocks, sequences are preempted while others speculate."""
    given = {"method": "draft_model", "model": str(qwen3_path if method == "itself" else gpt2_path)}
    if method == "ngram":
        given = {"method": method, "prompt_lookup_min": 1}
    given |= {"num_speculative_tokens": num, "adaptive": adaptive}
    llm = LLM(qwen3_path, speculative_config=given, **SMALL | {"kv_cache_memory": 2**17})
    tokens, num_preemptions = answer(llm, requests_of(random.Random(1), 20))
    assert tokens == expected
    assert num_preemptions > 0
    metrics = llm.engine.planner.counts
    if not adaptive:
        assert metrics.num_drafts > 50
        assert 0 < metrics.num_accepted_tokens <= metrics.num_draft_tokens
    if method == "itself" and not adaptive:
        assert metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens  # the rest is cut by stop ids


class SmallBlocks(ReferenceBackend):
    """Attention for heads of 8 numbers alone."""

    default_block_size = 5

    @staticmethod
    def unsupported_reason(device, dtype, head_dim, block_size):
        return None if head_dim == 8 else "heads are larger"


def test_the_cache_of_a_draft_model_holds_as_many_tokens_in_blocks_of_another_size(qwen3_path, tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "small", SmallBlocks)
    monkeypatch.setitem(PREFERRED, "cpu", ("small", "cpu"))
    draft = {"method": "draft_model", "model": str(tiny_models.save("mistral", tmp_path)), "adaptive": False}
    requests = requests_of(random.Random(2), 5)
    memory = {"kv_cache_memory": 2**20, "seed": 0}
    llm = LLM(qwen3_path, speculative_config=draft, **memory)
    info, blocks = llm.info, llm.engine.planner.proposer.block_manager
    assert (info.block_size, blocks.block_size) == (64, 5)
    assert 0 <= blocks.num_blocks * 5 - info.num_blocks * 64 < 5
    tokens, _ = answer(llm, requests)
    assert llm.engine.planner.counts.num_drafts > 0
    plain = LLM(qwen3_path, **memory)
    assert info.num_blocks < plain.info.num_blocks  # the memory is for both caches
    assert tokens == answer(plain, requests)[0]


def test_a_draft_model_computes_a_chunk_of_a_long_prompt_per_step_and_frees_the_blocks_of_an_aborted_request(qwen3_path):
    speculation = {"method": "draft_model", "model": str(qwen3_path), "adaptive": False}
    llm = LLM(qwen3_path, speculative_config=speculation, chunk_size=16, **SMALL)
    proposer = llm.engine.planner.proposer
    launched, launch = [], proposer._executor.launch

    def launch_and_count(plan, previous):
        launched[-1].append(sum(item.num_new_tokens for item in plan.scheduled))
        return launch(plan, previous)

    proposer._executor.launch = launch_and_count
    request = llm.engine.add_request(list(range(64)), SamplingParams(max_tokens=30, temperature=0, detokenize=False))
    while request.output is None:
        launched.append([])
        llm.engine.step()
    assert launched[:8] == [[], [], [], [], [16], [16], [16], [16]]  # its prompt, four steps. Then the draft model's own
    assert llm.engine.planner.counts.num_accepted_tokens > 10
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, detokenize=False))
    for _ in range(3):
        next(stream)
    manager = proposer.block_manager
    assert manager.num_free_blocks < manager.num_blocks
    stream.close()
    assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.long), "draft_model"])
def test_random_requests_have_the_same_bits_with_drafts_and_without(method, capsys):
    assert fuzz.main(["--requests", "8", "--seed", "5", "--speculative", method, "--enforce-eager"]) == 0
    assert "8 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("ngram", InvalidTypeError, "must be a dict such as"),
        ({}, InvalidValueError, "needs a method"),
        ({"method": "eagle"}, InvalidValueError, "must be 'ngram', 'draft_model', 'mtp', 'quantized', or .*, got 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, InvalidValueError, "num_speculative_tokens must be in 1 .. 64"),
        ({"method": "ngram", "prompt_lookup_min": 5}, InvalidValueError, r"lookup_max must be >= prompt_lookup_min \(5\)"),
        ({"method": "ngram", "prompt_lookup_min": 0}, InvalidValueError, "prompt_lookup_min must be >= 1"),
        ({"method": "ngram", "model": "x"}, InvalidValueError, "model, with method 'ngram', is 'x'; leave it out"),
        ({"method": "draft_model"}, InvalidValueError, "is None; pass a folder"),
        ({"method": "ngram", "adaptive": 1}, InvalidTypeError, "adaptive must be True or False"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, InvalidTypeError, "has no 'draft_tensor_parallel_size'; known"),
        ({"method": "draft_model", "model": "/no/such/folder"}, CheckpointNotFoundError, "/no/such/folder"),
        ({"method": "draft_model", "model": "tiny-gpt2"}, InvalidValueError, r"has \d+ token ids, the model has 96; choose a"),
    ],
)
def test_a_wrong_speculative_config_is_refused(given, error, message, qwen3_path):
    with pytest.raises(error, match=message):
        LLM(qwen3_path, speculative_config=given)
