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
SETTINGS = {"kv_cache_memory": 32 * 2**20}
PLAIN = ["gpt2", "gpt2_n_inner", "qwen2", "qwen3", "qwen3_one_kv_head", "qwen3_tied"]
FAMILIES = [*PLAIN, "qwen2_moe", "gemma3_window", "qwen3_5"]
DTYPES = ["float32", "bfloat16"]
ids = tiny_models.random_ids


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def cases(chosen, *factors):
    """The combinations of the factors. Only the chosen ones run by default."""
    return [pytest.param(*one, marks=[pytest.mark.long] * (one not in chosen)) for one in itertools.product(*factors)]


def logits_of(llm, prompts, watched, params=PARAMS, *, num_preemptions=0):
    """{number of output tokens: the row of logits that came next} of one of the prompts, as the sampler was given it.

    num_preemptions: How often it must have been preempted at least.
    """
    rows = {}
    sampler, build = llm.engine.executor.sampler, SamplingBatch.build
    requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
    request = requests[watched]
    [watched] = request.sequences

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
    assert request.output.metrics.num_preemptions >= num_preemptions
    return rows


def assert_same_bits(rows, expected):
    different = [position for position in expected if not torch.equal(rows[position], expected[position])]
    assert different == []


EVERY_PLACE = "every place of 17"  # the others: the first, the middle and the last place
BATCHES = {
    ("gpt2", "float32", 1): (2, 40),
    ("gpt2_n_inner", "float32", 2): (3, EVERY_PLACE),
    ("gpt2", "bfloat16", 1): (EVERY_PLACE,),
    ("qwen2", "bfloat16", 1): (2, 40),
    ("qwen3", "float32", 1): (2, EVERY_PLACE),
    ("qwen3", "bfloat16", 2): (17,),
    ("qwen3_one_kv_head", "float32", 1): (40,),
    ("qwen2_moe", "float32", 1): (9,),  # how many tokens choose an expert depends on the other prompts
    ("gemma3_window", "float32", 1): (9,),
    ("qwen3_5", "float32", 1): (9,),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "num_threads"), cases(BATCHES, FAMILIES, DTYPES, (1, 2)))
def test_a_prompt_gets_the_same_logits_at_every_place_in_any_batch(path_of, set_num_threads, family, dtype, num_threads):
    """Other prompts have 1 to 200 tokens. The prompt is two chunks, the second of five tokens."""
    set_num_threads(num_threads)
    rng = random.Random(0)
    llm = LLM(path_of(family), dtype=dtype, chunk_size=32, enable_prefix_caching=False, **SETTINGS)
    prompt = ids(rng, 37)
    alone = logits_of(llm, [prompt], 0)
    for size in BATCHES.get((family, dtype, num_threads), (2, 17, 40)):
        places = range(17) if size == EVERY_PLACE else {0, size // 2, size - 1}
        for place in places:
            prompts = [ids(rng, rng.choice([1, 2, 5, 30, 100, 200])) for _ in range(max(places) + 1)]
            prompts[place] = prompt
            assert_same_bits(logits_of(llm, prompts, place), alone)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "gemma3_window", "qwen3_5"])
def test_the_number_of_threads_may_change_between_steps_and_every_step_gives_the_same_bits(path_of, set_num_threads, family):
    rng = random.Random(0)
    prompts = [ids(rng, length) for length in (37, 3, 90)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=8, logprobs=3, detokenize=False)

    def bits(numbers_of_threads):
        set_num_threads(1)
        llm = LLM(path_of(family), dtype="float32", chunk_size=32, **SETTINGS)
        requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
        for num_threads in itertools.cycle(numbers_of_threads):
            set_num_threads(num_threads)
            llm.engine.step()
            if not llm.engine.num_unfinished:
                break
        answers = [request.output.outputs[0] for request in requests]
        return [(answer.token_ids, answer.logprobs) for answer in answers]

    assert bits([1, 2, 3, 1]) == bits([1])


def test_with_plain_linears_the_bits_do_depend_on_the_batch(path_of):
    """The negative control: what the tests above compare can differ."""
    llm = LLM(path_of("qwen3"), dtype="float32", enforce_eager=True, **SETTINGS)
    rng = random.Random(0)
    prompt = ids(rng, 37)
    alone = logits_of(llm, [prompt], 0)
    beside = logits_of(llm, [prompt, *(ids(rng, 20) for _ in range(7))], 0)
    assert any(not torch.equal(beside[position], alone[position]) for position in alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), cases({("gpt2_n_inner", "bfloat16"), ("qwen3_one_kv_head", "float32")}, PLAIN, DTYPES)
)
def test_batch_invariant_gives_the_same_bits_after_a_prefix_hit_and_after_preemptions(path_of, family, dtype):
    rng = random.Random(2)
    params = SamplingParams(temperature=0, max_tokens=20, detokenize=False)
    settings = {"dtype": dtype, "chunk_size": 16, "block_size": 8, "batch_invariant": True}
    prompt = ids(rng, 45)  # two whole chunks, and a part of one: five blocks, and a part of one
    alone = logits_of(LLM(path_of(family), enable_prefix_caching=False, **SETTINGS, **settings), [prompt], 0, params)

    cached = LLM(path_of(family), **SETTINGS, **settings)
    logits_of(cached, [prompt[:40] + ids(rng, 9)], 0, params)
    [output] = cached.generate(prompt, params, use_tqdm=False)
    assert output.metrics.num_cached_tokens == 40  # every whole block, in the middle of a chunk
    assert_same_bits(logits_of(cached, [prompt], 0, params), alone)

    tight = tiny_models.cramped(path_of(family), 80, max_num_seqs=8, **settings)
    for place in (0, 2):
        prompts = [ids(rng, 5) for _ in range(3)]
        prompts[place] = prompt
        is_youngest = place == 2  # which goes first
        assert_same_bits(logits_of(tight, prompts, place, params, num_preemptions=int(is_youngest)), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    cases(
        {("gpt2", "float32", "cpu"), ("qwen3", "bfloat16", "cpu"), ("qwen2", "float32", "reference")},
        PLAIN,
        DTYPES,
        ("cpu", "reference"),
    ),
)
def test_batch_invariant_tells_the_same_log_probabilities_of_a_text_as_answer_and_as_prompt(path_of, family, dtype, backend):
    """Tokens that were generated one by one beside others, and the same tokens in chunks of a prompt."""
    rng = random.Random(4)
    settings = {"dtype": dtype, "chunk_size": 16, "block_size": 8, "batch_invariant": True, "attention_backend": backend}
    llm = LLM(path_of(family), **SETTINGS, **settings)
    params = SamplingParams(temperature=1.0, seed=6, max_tokens=30, logprobs=2, prompt_logprobs=2, detokenize=False)
    outputs = llm.generate([ids(rng, length) for length in (21, 1, 40)], params, use_tqdm=False)
    for output in outputs:
        text = output.prompt_token_ids + output.outputs[0].token_ids
        [again] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=2, detokenize=False), use_tqdm=False)
        assert again.prompt_logprobs[1:] == output.prompt_logprobs[1:] + output.outputs[0].logprobs


def test_without_batch_invariant_the_log_probabilities_of_an_answer_and_of_a_prompt_differ_in_bits(path_of):
    """The negative control: what the test above compares can differ."""
    llm = LLM(path_of("qwen3"), dtype="float32", chunk_size=16, block_size=8, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, detokenize=False)
    [output] = llm.generate([list(range(1, 22))], params, use_tqdm=False)
    text = output.prompt_token_ids + output.outputs[0].token_ids
    [again] = llm.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    told, expected = output.outputs[0].logprobs, again.prompt_logprobs[len(output.prompt_token_ids) :]
    assert told != expected
    for one, same in zip(told, expected, strict=True):
        assert [entry.logprob for entry in one.values()] == pytest.approx([entry.logprob for entry in same.values()], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ["--family=gemma3_window", "--adapters=2"],
        ["--family=qwen3_5", "--dtype=bfloat16"],
        *(pytest.param([f"--family={family}"], marks=pytest.mark.long) for family in FAMILIES),
    ],
    ids=" ".join,
)
def test_random_requests_have_the_same_bits_alone_together_after_hits_and_preempted(given, capsys):
    """With drafts, beams, aborts and shared prefixes. contributing.md has the command for 2,000."""
    assert fuzz.main(["--part=hits", "--requests=12", "--seed=3", *given]) == 0
    told = capsys.readouterr().out
    for words in ("0 differ: 12 requests", "after a hit", *([fuzz.MERGED] if "--adapters=2" in given else [])):
        assert words in told


@pytest.mark.slow
def test_random_requests_find_a_prefix_that_is_not_the_same(monkeypatch, capsys):
    """The negative control: a hit for any tokens at these positions."""
    in_blocks = PrefixIndex.in_blocks
    monkeypatch.setattr(PrefixIndex, "in_blocks", lambda self, token_ids: in_blocks(self, [0] * len(token_ids)))
    assert fuzz.main(["--part=hits", "--requests=8", "--seed=1", "--family=gemma3_window"]) == 1
    assert "different with" in capsys.readouterr().out
