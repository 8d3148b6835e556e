"""The same prompt gets the same bits whatever else is in the batch; with batch_invariant also after hits and preemptions."""

import itertools
import random

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.scheduling.prefix_index import PrefixIndex
from tests import fuzz
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("kernels")

PARAMS = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
# GPT-2's head is tied, too.
FAMILIES = ["gpt2", "gpt2_n_inner", "qwen2", "qwen3", "qwen3_one_kv_head", pytest.param("qwen3_tied", marks=pytest.mark.long)]


def ids(rng, length):
    return [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]


def logits_of(llm, prompts, watched, params=PARAMS):
    """{number of output tokens: the row of logits that came next} of one of the prompts, as the sampler was given it."""
    rows = {}
    sampler, build = llm.engine.executor.sampler, SamplingBatch.build
    requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
    watched = requests[watched].sequences[0]

    class Watching:
        sequences = ()

        @staticmethod
        def build(sequences, *arguments):
            Watching.sequences = list(sequences)
            return build(sequences, *arguments)

    def watching(head_rows, batch):
        for row, seq in enumerate(Watching.sequences):
            if seq is watched:
                rows[seq.num_output_tokens] = head_rows.logits[row].clone()
        return sampler(head_rows, batch)

    llm.engine.executor.sampler = watching
    SamplingBatch.build = Watching.build
    try:
        while llm.engine.num_unfinished:
            llm.engine.step()
    finally:
        llm.engine.executor.sampler, SamplingBatch.build = sampler, build
    assert len(rows) == params.max_tokens
    return rows


def assert_same_bits(rows, expected):
    different = [position for position in expected if not torch.equal(rows[position], expected[position])]
    assert different == []


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return tiny_models.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_gets_the_same_logits_at_every_place_in_any_batch(path, dtype):
    assert_same_bits_in_batches_of((2, 17, 40), path, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2_n_inner", "qwen3"])
def test_several_threads_give_the_same_bits_in_any_batch_too(family, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same_bits_in_batches_of((3, 17), tiny_models.save(family, tmp_path), "float32")
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "qwen2_moe", "gemma3_window", "qwen3_5"])
def test_the_number_of_threads_may_change_between_steps_and_every_step_gives_the_same_bits(family, tmp_path):
    path, before = tiny_models.save(family, tmp_path), torch.get_num_threads()
    rng = random.Random(0)
    prompts = [ids(rng, length) for length in (37, 3, 90)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=12, logprobs=3, detokenize=False)

    def bits(numbers_of_threads):
        torch.set_num_threads(1)
        llm = LLM(path, dtype="float32", kv_cache_memory=32 * 2**20, chunk_size=32)
        requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
        for num_threads in itertools.cycle(numbers_of_threads):
            torch.set_num_threads(num_threads)
            llm.engine.step()
            if not llm.engine.num_unfinished:
                break
        answers = [request.output.outputs[0] for request in requests]
        return [(answer.token_ids, answer.logprobs) for answer in answers]

    try:
        expected, changing = bits([1]), bits([1, 2, 3, 1])
    finally:
        torch.set_num_threads(before)
    assert changing == expected


@pytest.mark.slow
def test_experts_give_the_same_bits_in_any_batch_too(tmp_path):
    """How many tokens choose an expert depends on the other prompts."""
    assert_same_bits_in_batches_of((9,), tiny_models.save("qwen2_moe", tmp_path), "float32")


def assert_same_bits_in_batches_of(sizes, path, dtype):
    """Beside prompts of 1 to 200 tokens. The prompt is two chunks, the second of five tokens."""
    rng = random.Random(0)
    llm = LLM(path, dtype=dtype, kv_cache_memory=32 * 2**20, chunk_size=32, enable_prefix_caching=False)
    prompt = ids(rng, 37)
    alone = logits_of(llm, [prompt], 0)
    for size in sizes:
        for place in {0, size // 2, size - 1}:
            prompts = [ids(rng, rng.choice([1, 2, 5, 30, 100, 200])) for _ in range(size)]
            prompts[place] = prompt
            assert_same_bits(logits_of(llm, prompts, place), alone)


@pytest.mark.slow
def test_every_place_in_a_batch_of_17_gives_the_same_bits(path):
    rng = random.Random(1)
    llm = LLM(path, dtype="float32", kv_cache_memory=32 * 2**20, enable_prefix_caching=False)
    prompt = ids(rng, 21)
    alone = logits_of(llm, [prompt], 0)
    prompts = [ids(rng, rng.randrange(1, 60)) for _ in range(17)]
    for place in range(17):
        assert_same_bits(logits_of(llm, [*prompts[:place], prompt, *prompts[place + 1 :]], place), alone)


def test_with_plain_linears_the_bits_do_depend_on_the_batch(tmp_path):
    """The negative control: what the tests above compare can differ."""
    llm = LLM(tiny_models.save("qwen3", tmp_path), dtype="float32", kv_cache_memory=32 * 2**20, enforce_eager=True)
    rng = random.Random(0)
    prompt = ids(rng, 37)
    alone = logits_of(llm, [prompt], 0)
    beside = logits_of(llm, [prompt, *(ids(rng, 20) for _ in range(7))], 0)
    assert any(not torch.equal(beside[position], alone[position]) for position in alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_gives_the_same_bits_after_a_prefix_hit_and_after_preemptions(path, dtype):
    rng = random.Random(2)
    params = SamplingParams(temperature=0, max_tokens=20, detokenize=False)
    settings = {"dtype": dtype, "chunk_size": 16, "block_size": 8, "batch_invariant": True}
    prompt = ids(rng, 45)  # two whole chunks, and a part of one: five blocks, and a part of one
    alone = logits_of(LLM(path, kv_cache_memory=32 * 2**20, enable_prefix_caching=False, **settings), [prompt], 0, params)

    cached = LLM(path, kv_cache_memory=32 * 2**20, **settings)
    logits_of(cached, [prompt[:40] + ids(rng, 9)], 0, params)
    request = cached.engine.add_request(prompt, params)
    while cached.engine.num_unfinished:
        cached.engine.step()
    assert request.output.metrics.num_cached_tokens == 40  # every whole block, in the middle of a chunk
    assert_same_bits(logits_of(cached, [prompt], 0, params), alone)

    block_bytes = cached.info.num_cache_bytes // cached.info.num_blocks
    tight = LLM(path, kv_cache_memory=12 * block_bytes, **settings)
    for place in (0, 2):
        prompts = [ids(rng, 5) for _ in range(3)]
        prompts[place] = prompt
        requests = []
        add_request = tight.engine.add_request
        tight.engine.add_request = lambda *arguments, add=add_request, to=requests: to.append(add(*arguments)) or to[-1]
        rows = logits_of(tight, prompts, place, params)
        tight.engine.add_request = add_request
        assert sum(request.output.metrics.num_preemptions for request in requests) > 0
        if place == 2:
            assert requests[2].output.metrics.num_preemptions > 0  # the youngest goes first
        assert_same_bits(rows, alone)


@pytest.mark.slow
def test_batch_invariant_tells_the_same_tokens_as_without(path):
    rng = random.Random(3)
    prompts = [ids(rng, rng.randrange(1, 80)) for _ in range(12)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, detokenize=False)
    settings = {"dtype": "float32", "chunk_size": 16, "block_size": 8, "kv_cache_memory": 200_000}
    answers = [
        [output.outputs[0].token_ids for output in LLM(path, batch_invariant=on, **settings).generate(prompts, params, False)]
        for on in (True, False)
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_tells_the_same_log_probabilities_of_a_text_as_answer_and_as_prompt(path, dtype, backend):
    """Tokens that were generated one by one beside others, and the same tokens in chunks of a prompt."""
    rng = random.Random(4)
    settings = {"dtype": dtype, "chunk_size": 16, "block_size": 8, "batch_invariant": True, "attention_backend": backend}
    llm = LLM(path, kv_cache_memory=32 * 2**20, **settings)
    params = SamplingParams(temperature=1.0, seed=6, max_tokens=40, logprobs=2, prompt_logprobs=2, detokenize=False)
    outputs = llm.generate([ids(rng, length) for length in (21, 1, 40, 7)], params, use_tqdm=False)
    for output in outputs:
        text = output.prompt_token_ids + output.outputs[0].token_ids
        [again] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=2, detokenize=False), use_tqdm=False)
        assert again.prompt_logprobs[1:] == output.prompt_logprobs[1:] + output.outputs[0].logprobs


def test_without_batch_invariant_the_log_probabilities_of_an_answer_and_of_a_prompt_differ_in_bits(tmp_path):
    """The negative control: what the test above compares can differ."""
    llm = LLM(tiny_models.save("qwen3", tmp_path), dtype="float32", kv_cache_memory=32 * 2**20, chunk_size=16, block_size=8)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, detokenize=False)
    [output] = llm.generate([list(range(1, 22))], params, use_tqdm=False)
    text = output.prompt_token_ids + output.outputs[0].token_ids
    [again] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    told, expected = output.outputs[0].logprobs, again.prompt_logprobs[len(output.prompt_token_ids) :]
    assert told != expected
    for one, same in zip(told, expected, strict=True):
        assert [entry.logprob for entry in one.values()] == pytest.approx([entry.logprob for entry in same.values()], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_window", "qwen3_5"])
def test_random_requests_have_the_same_bits_alone_together_behind_hits_and_preempted(family, capsys):
    """With drafts, beams, aborts and shared prefixes. contributing.md has the command for 2,000."""
    assert fuzz.main(["--part=hits", "--requests=12", "--seed=3", "--family", family]) == 0
    told = capsys.readouterr().out
    assert "0 differ: 12 requests" in told
    assert "after a hit" in told


@pytest.mark.slow
def test_random_requests_with_adapters_have_the_tokens_of_the_merged_models(capsys):
    given = ["--part=hits", "--requests=12", "--seed=3", "--family=qwen3", "--adapters=2"]
    assert fuzz.main(given) == 0
    told = capsys.readouterr().out
    assert "0 differ: 12 requests" in told
    assert fuzz.MERGED in told


@pytest.mark.slow
def test_random_requests_find_a_prefix_that_is_not_the_same(monkeypatch, capsys):
    """The negative control: a hit for any tokens at these positions."""
    in_blocks = PrefixIndex.in_blocks
    monkeypatch.setattr(PrefixIndex, "in_blocks", lambda self, token_ids: in_blocks(self, [0] * len(token_ids)))
    assert fuzz.main(["--part=hits", "--requests=12", "--seed=1", "--family=gemma3_window"]) == 1
    assert "different with" in capsys.readouterr().out
