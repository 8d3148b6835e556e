"""What SamplingParams asks for, seen in the answers: several of them, log-probabilities, lists of ids, penalties, functions of
the user's own. Each against transformers on the same weights, against a few lines of Python, or against itself run otherwise.
"""

import functools
import math
import random

import pytest
import torch
import transformers

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.errors import InvalidTypeError
from nanoinfer.features.tracing import StepScheduled
from nanoinfer.outputs import Logprob
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import tiny_models
from tests.helpers.tiny_models import assert_nothing_is_left

VOCAB_SIZE = tiny_models.VOCAB_SIZE
MEMORY = 2**24
BLOCK_BYTES = 2 * 2 * 4 * 2 * 16 * 4  # of qwen3_path: k and v, layers, tokens, heads, head_dim, bytes
INF = math.inf


def load(path, *, num_blocks=None, **arguments):
    """An LLM with blocks of 4 tokens."""
    return LLM(path, block_size=4, kv_cache_memory=BLOCK_BYTES * num_blocks if num_blocks else MEMORY, **arguments)


def asked(**given):
    """Token ids only, the same in every run."""
    return SamplingParams(**{"max_tokens": 10, "detokenize": False, "seed": 3} | given)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def answers(llm, prompt, params):
    [output] = generate(llm, [prompt], params)
    return output.outputs


def token_ids(llm, prompt, params):
    [answer] = answers(llm, prompt, params)
    return answer.token_ids


def random_prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def steps(recorder):
    return [event for event in recorder.events if isinstance(event, StepScheduled)]


@functools.cache
def oracle(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def oracle_logits(path, ids):
    with torch.no_grad():
        return oracle(path)(torch.tensor([ids])).logits[0]  # [len(ids), vocab]


# ---- several answers

SEVERAL = [  # (prompt, params): n of 1 to 5; one prompt ends with its block, two share a beginning, one is a single token
    (random_prompt(11), {"n": 5, "seed": 100}),
    (random_prompt(3, seed=1), {"n": 1, "seed": 200, "temperature": 0.7}),
    (random_prompt(11)[:8], {"n": 3, "seed": 2**64 - 2, "top_p": 0.9, "max_tokens": 9}),  # seed + i passes 64 bits
    (random_prompt(1, seed=2), {"n": 4, "seed": 300, "top_k": 20, "presence_penalty": 1.0}),
    (random_prompt(6, seed=3), {"n": 2, "seed": 0, "max_tokens": 1}),
]
WAYS = {
    "as usual": {},
    "two at a time": {"max_num_seqs": 2},
    "three at a time without prefix caching": {"max_num_seqs": 3, "enable_prefix_caching": False},
    "few blocks": {"num_blocks": 10},
    "few blocks without prefix caching": {"num_blocks": 10, "enable_prefix_caching": False},
    "few blocks, four at a time, in chunks": {"num_blocks": 8, "max_num_seqs": 4, "chunk_size": 5},
    "batch_invariant, few blocks": {"batch_invariant": True, "num_blocks": 10, "chunk_size": 4},
    "a stage of one's own": {"stages": [*STAGES, lambda logits, batch: logits]},
}
EVERYTHING = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.97, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.3,
    "frequency_penalty": 0.2, "no_repeat_ngram_size": 3, "logit_bias": {40: 2.0, 41: -2.0}, "stop_token_ids": [60],
    "allowed_token_ids": list(range(2, 94)), "bad_words": [[7], [8, 9]], "min_tokens": 12, "max_tokens": 16, "logprobs": 2,
    "prompt_logprobs": 1, "logits_processors": [lambda prompt_ids, output_ids, logits: logits * 1.1],
}  # fmt: skip
OTHERS = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"n": 2, "presence_penalty": 1.0}, {"logprobs": 3}]


@pytest.fixture(scope="module")
def each_alone(loaded_ids):
    """The token ids of every answer to random_prompt(3 + i) with OTHERS[i], and to random_prompt(8) with EVERYTHING."""
    asked_for = [(random_prompt(3 + i), other) for i, other in enumerate(OTHERS)] + [(random_prompt(8), EVERYTHING)]
    return [[answer.token_ids for answer in answers(loaded_ids, prompt, asked(**given))] for prompt, given in asked_for]


@pytest.fixture(scope="module")
def one_by_one(loaded_ids):
    """What SEVERAL must give: every answer of a prompt as a request of its own, with seed + i."""
    return [
        [
            token_ids(loaded_ids, prompt, asked(**params | {"n": 1, "seed": (params["seed"] + i) % 2**64}))
            for i in range(params["n"])
        ]
        for prompt, params in SEVERAL
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_same_seeds_give_the_same_answers_in_every_way_and_answer_i_that_of_seed_plus_i(
    qwen3_path, one_by_one, each_alone, way
):
    """Answer i is that of seed + i. Alone, among others, streamed, and with every parameter on. Logits of other batch shapes
    differ by rounding, which moves one of these 140 draws about once in 10,000 machines.
    """
    llm = load(qwen3_path, **WAYS[way])
    prompts, params = [prompt for prompt, _ in SEVERAL], [asked(**given) for _, given in SEVERAL]
    for _ in range(2 if way in ("as usual", "two at a time") else 1):  # the second time with a cache that holds all prompts
        outputs = generate(llm, prompts, params)
        assert [[answer.token_ids for answer in output.outputs] for output in outputs] == one_by_one
        assert [[answer.index for answer in output.outputs] for output in outputs] == [list(range(p.n)) for p in params]
        assert {answer.finish_reason for output in outputs for answer in output.outputs} == {"length"}
        assert any(output.metrics.num_preemptions for output in outputs) == ("few blocks" in way)
        assert [output.metrics.num_output_tokens for output in outputs] == [p.n * p.max_tokens for p in params]
    everything = asked(**EVERYTHING)
    assert [[i for delta in llm.stream(random_prompt(8), everything) for i in delta.token_ids]] == each_alone[-1]
    prompts = [random_prompt(3 + i) for i in range(len(OTHERS))]
    outputs = generate(llm, [*prompts, random_prompt(8)], [*(asked(**other) for other in OTHERS), everything])
    assert [[answer.token_ids for answer in output.outputs] for output in outputs] == each_alone
    assert len(outputs[-1].prompt_logprobs) == 8
    assert len(each_alone[-1][0]) >= 12
    assert_nothing_is_left(llm)


def test_the_answers_of_a_prompt_differ_with_a_seed_and_without(ids_llm):
    """Temperature 100: two of four answers of 10 ids agree by chance once in 1e19."""
    for seed in (None, 7):
        assert len({tuple(answer.token_ids) for answer in answers(ids_llm, [1], asked(n=4, temperature=100, seed=seed))}) == 4


@pytest.mark.parametrize(("num_prompt_tokens", "chunk_size"), [(1, 1024), (11, 4)])
def test_a_prompt_of_several_answers_is_computed_once(qwen3_path, num_prompt_tokens, chunk_size):
    recorder = Recorder()
    llm = load(qwen3_path, tracer=recorder, chunk_size=chunk_size, enable_prefix_caching=False)
    generate(llm, [random_prompt(num_prompt_tokens)], asked(n=4, max_tokens=5))
    *prefill, first, second, third, last = [event.num_new_tokens for event in steps(recorder)]
    assert sum(sum(counts) for counts in prefill) == num_prompt_tokens
    assert len(prefill) == -(-num_prompt_tokens // chunk_size)
    assert first == second == third == last == (1, 1, 1, 1)


def test_the_answers_share_the_blocks_that_the_prompt_fills(qwen3_path):
    llm = load(qwen3_path, tracer=(recorder := Recorder()), num_blocks=40)
    for num_prompt_tokens, num_shared in ((8, 2), (9, 2), (11, 2), (12, 3)):
        generate(llm, [random_prompt(num_prompt_tokens, seed=num_prompt_tokens)], asked(n=4, max_tokens=2))
        prefill, decode = steps(recorder)[-2:]
        assert prefill.num_free_blocks == 40 - -(-num_prompt_tokens // 4)
        assert decode.num_free_blocks == 40 - num_shared - 4


def test_answers_beyond_max_num_seqs_wait_and_find_the_prompt_in_the_cache(qwen3_path):
    recorder = Recorder()
    llm = load(qwen3_path, tracer=recorder, max_num_seqs=2)
    generate(llm, [random_prompt(12)], asked(n=5, max_tokens=4))
    assert max(len(event.num_new_tokens) for event in steps(recorder)) == 2
    assert steps(recorder)[0].num_new_tokens == (12,)
    # Three answers start late: they find two blocks of four, and compute the rest of the prompt for themselves.
    assert sum(sum(event.num_new_tokens) for event in steps(recorder)) == 12 + 2 * 3 + 3 * (4 + 3)


def test_answers_that_wait_go_before_a_younger_request_that_waits(qwen3_path):
    recorder = Recorder()
    llm = load(qwen3_path, tracer=recorder, max_num_seqs=2)
    generate(llm, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [asked(n=n, max_tokens=5) for n in (4, 1, 1)])
    turns = [event.sequence_ids for event in steps(recorder)]
    assert turns == [("0", "1")] * 5 + [("0.1", "0.2")] * 5 + [("0.3", "2")] * 5  # two places, five steps each


def test_blocks_are_taken_from_a_younger_request_and_not_from_the_further_answers_of_an_older(qwen3_path):
    llm = load(qwen3_path, num_blocks=12, chunk_size=4)
    params = [asked(n=3), asked(max_tokens=20)]
    older, younger = generate(llm, [random_prompt(8), [1]], params)
    assert (older.metrics.num_preemptions, younger.metrics.num_preemptions) == (0, 1)
    assert_nothing_is_left(llm)


@pytest.mark.parametrize("place", [0, 2])
def test_an_answer_that_ends_early_or_with_its_first_token_does_not_end_the_others(ids_llm, place):
    prompt, several = [1, 2, 3], asked(n=4, temperature=3.0)
    whole = [answer.token_ids for answer in answers(ids_llm, prompt, several)]
    stop_id = next(i for i in whole[1][place:-1] if sum(i in ids for ids in whole) == 1 and i not in whole[1][:place])
    ended = answers(ids_llm, prompt, asked(n=4, temperature=3.0, stop_token_ids=[stop_id]))
    assert [answer.finish_reason for answer in ended] == ["length", "stop", "length", "length"]
    assert [answer.stop_reason for answer in ended] == [None, stop_id, None, None]
    assert ended[1].token_ids == whole[1][: whole[1].index(stop_id) + 1]
    assert [answer.token_ids for answer in ended if answer.index != 1] == [whole[0], whole[2], whole[3]]


@pytest.mark.parametrize("arguments", [{"chunk_size": 4}, {"max_num_seqs": 2}, {"num_blocks": 12}], ids=str)
def test_an_abort_at_any_step_frees_all_answers_and_harms_no_other(qwen3_path, arguments):
    llm = load(qwen3_path, **arguments)
    other = asked(n=2, seed=9, max_tokens=6)
    expected = [answer.token_ids for answer in answers(llm, [4, 5, 6], other)]
    for num_steps in range(7):
        doomed = llm.engine.add_request(random_prompt(10), asked(n=4))
        kept = llm.engine.add_request([4, 5, 6], other)
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(doomed.request_id)
        assert [answer.finish_reason for answer in doomed.output.outputs] == ["abort"] * 4
        while kept.output is None:
            llm.engine.step()
        assert [answer.token_ids for answer in kept.output.outputs] == expected
        assert_nothing_is_left(llm)


@pytest.mark.parametrize("part", ["the tracer", "the forward pass", "the sampler"])
def test_a_step_that_fails_can_be_made_again_with_several_answers(qwen3_path, monkeypatch, part):
    """Also the first after the fork, when copies of the prompt's last block are owed."""
    llm = load(qwen3_path, tracer=(tracer := Recorder()))
    engine, prompt, params = llm.engine, random_prompt(6), asked(n=3, max_tokens=5)
    owner, name = {
        "the tracer": (tracer, "emit"),
        "the forward pass": (engine.executor.runner, "forward"),
        "the sampler": (engine.executor, "sampler"),
    }[part]
    expected = [token_ids(llm, prompt, asked(seed=3 + i, max_tokens=5)) for i in range(3)]
    for num_steps in range(4):
        request = engine.add_request(prompt, params)
        for _ in range(num_steps):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        while request.output is None:
            engine.step()
        assert [answer.token_ids for answer in request.output.outputs] == expected
        assert_nothing_is_left(llm)


def test_several_answers_in_text_stop_each_for_itself(llm):
    """The bundled model: whatever it has learnt, each answer is the one that its own seed gives."""
    params = {"temperature": 2.0, "max_tokens": 24, "stop": [".", "\n", "e a"], "logprobs": 1}
    several = answers(llm, "Once upon a time", SamplingParams(n=4, seed=11, **params))
    alone = [answers(llm, "Once upon a time", SamplingParams(seed=11 + i, **params))[0] for i in range(4)]
    assert [(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in several] == [
        (a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in alone
    ]
    assert len({answer.text for answer in several}) > 1


# ---- log-probabilities


def values_of(told):
    """Log-probabilities told for all ids -> [tokens, vocab]."""
    return torch.tensor([[row[i].logprob for i in range(VOCAB_SIZE)] for row in told])


def compare_logprobs(path, prompt, answer, *, shift=0):
    expected = oracle_logits(path, prompt + answer.token_ids).log_softmax(-1)[len(prompt) - 1 + shift :][
        : len(answer.token_ids)
    ]
    torch.testing.assert_close(values_of(answer.logprobs)[: len(expected)], expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_logprobs_are_transformers_log_softmax(request, family):
    path = request.getfixturevalue(f"{family}_path")
    llm = LLM(path, kv_cache_memory=MEMORY)
    prompts, more = [random_prompt(length) for length in (1, 7, 30)], {"temperature": 0.5, "top_k": 3, "prompt_logprobs": -1}
    params = [asked(logprobs=-1), asked(logprobs=-1, temperature=0.0), asked(logprobs=VOCAB_SIZE, **more)]
    for prompt, output in zip(prompts, generate(llm, prompts, params), strict=True):
        compare_logprobs(path, prompt, output.outputs[0])
    compare_prompt_logprobs(path, output)
    with pytest.raises(AssertionError):  # it would notice a row too late
        compare_logprobs(path, prompt, output.outputs[0], shift=1)


def test_the_cumulative_logprob_is_the_sum_and_none_without_logprobs(ids_llm):
    for answer in answers(ids_llm, [1, 2, 3], asked(logprobs=2, n=3)):
        drawn = [row[i].logprob for row, i in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(drawn))
        assert answer.cumulative_logprob < 0
        assert len(drawn) == 10
    [answer] = answers(ids_llm, [1, 2, 3], asked())
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)


def test_a_logprob_tells_its_ids_text(llm, ids_llm):
    params = SamplingParams(seed=1, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    [output] = generate(llm, "Once upon a time", params)
    tokenizer = llm.get_tokenizer()
    rows = output.outputs[0].logprobs + output.prompt_logprobs[1:]
    for row in rows:
        for token_id, told in row.items():
            assert isinstance(told, Logprob)
            assert told.decoded_token == tokenizer.decode([token_id])
    assert len({told.decoded_token for row in rows for told in row.values()}) > 3
    [answer] = answers(ids_llm, [1, 2], asked(logprobs=1))
    assert {told.decoded_token for row in answer.logprobs for told in row.values()} == {None}


# ---- log-probabilities of the prompt


def compare_prompt_logprobs(path, output, *, shift=1):
    prompt, told = output.prompt_token_ids, output.prompt_logprobs
    assert len(told) == len(prompt)
    assert told[0] is None
    if len(prompt) == 1:
        return
    expected = oracle_logits(path, prompt).log_softmax(-1)[1 - shift : len(prompt) - shift]
    torch.testing.assert_close(values_of(told[1:]), expected, atol=1e-4, rtol=0)
    assert [next(iter(row)) for row in told[1:]] == prompt[1:]  # the prompt's own token comes first


CHUNKS = [{}, {"chunk_size": 4, "max_num_batched_tokens": 6}, {"enable_prefix_caching": False, "chunk_size": 1}]


@pytest.mark.parametrize("way", [*CHUNKS, {"logprobs_mode": "processed"}], ids=str)
def test_prompt_logprobs_are_transformers_log_softmax_shifted_by_one(qwen3_path, way):
    llm = load(qwen3_path, **way)
    prompts = [random_prompt(length) for length in (1, 2, 4, 9, 30)]
    params = asked(prompt_logprobs=-1, max_tokens=2, temperature=0.5)
    for _ in range(2):  # the second time with a cache that holds all prompts
        outputs = generate(llm, prompts, params)
        for output in outputs:
            compare_prompt_logprobs(qwen3_path, output)
            assert output.outputs[0].logprobs is None
        assert_nothing_is_left(llm)
    with pytest.raises(AssertionError):  # it would notice rows that are not shifted
        compare_prompt_logprobs(qwen3_path, output, shift=0)


def test_a_prompt_that_is_preempted_before_its_end_has_all_its_logprobs_once(qwen3_path):
    llm = load(qwen3_path, num_blocks=13, chunk_size=4, max_num_batched_tokens=4)
    older = llm.engine.add_request([1, 2, 3], asked(max_tokens=30))
    llm.engine.step()
    young = llm.engine.add_request(random_prompt(38), asked(prompt_logprobs=-1, max_tokens=3))
    [seq], num_computed = young.sequences, 0
    while not young.metrics.num_preemptions:
        num_computed = seq.num_computed_tokens
        llm.engine.step()
        assert seq.num_output_tokens == 0  # it is preempted before its first token,
    assert num_computed > 4  # but after some of its chunks
    while young.output is None or older.output is None:
        llm.engine.step()
    compare_prompt_logprobs(qwen3_path, young.output)
    assert_nothing_is_left(llm)


def test_prompt_logprobs_survive_preemption_after_the_prompt(qwen3_path):
    llm = load(qwen3_path, num_blocks=12, chunk_size=8)
    prompts = [random_prompt(10, seed=i) for i in range(4)]
    for n in (1, 3):
        outputs = generate(llm, prompts, asked(prompt_logprobs=-1, max_tokens=16, n=n))
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        for output in outputs:
            compare_prompt_logprobs(qwen3_path, output)
        assert_nothing_is_left(llm)


def test_a_request_with_prompt_logprobs_reads_no_cached_prefix_and_others_still_do(ids_llm):
    prompt = random_prompt(20, seed=77)
    params = [asked(), asked(prompt_logprobs=1), asked()]
    outputs = [generate(ids_llm, [prompt], each)[0] for each in params]
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 0, 16]
    assert [output.prompt_logprobs is None for output in outputs] == [True, False, True]
    assert outputs[0].outputs == outputs[1].outputs == outputs[2].outputs


# ---- lists of ids


def wanting(*ids):
    """A logits processor that leads greedy rows along these ids, again and again, past what is forbidden."""

    def processor(prompt_ids, output_ids, logits):
        logits = logits.clone()
        logits[ids[len(output_ids) % len(ids)]] += 1000.0
        return logits

    return processor


def one_token_word(llm):
    """A word that is one token both with and without a space before it."""
    encode = llm.engine.tokenizer.encode
    words = ("the", "a", "and", "time", "one", "day", "said", "was", "to", "He", "She", "it")
    return next((w, encode(w)[0], encode(" " + w)[0]) for w in words if len(encode(w)) == len(encode(" " + w)) == 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_as_text_never_comes_out_with_or_without_a_space_before_it(llm, temperature):
    word, bare, spaced = one_token_word(llm)
    assert bare != spaced
    params = {"temperature": temperature, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    params["logit_bias"] = {bare: 50.0, spaced: 50.0}  # else the model itself might never say it

    def said(*bad_words):
        return set(answers(llm, "Once upon", SamplingParams(bad_words=bad_words, **params))[0].token_ids)

    assert said() <= {bare, spaced}
    assert not (said(word) | said(" " + word)) & {bare, spaced}
    assert said([spaced]) == {bare}  # as ids, a word is those ids alone


def test_a_bad_word_of_several_tokens_never_comes_out_in_either_spelling(llm):
    encode = llm.engine.tokenizer.encode
    words = ("Once upon a time", "One day", "the cat", "said to")
    word = next(w for w in words if len(encode(w)) == len(encode(" " + w)) > 1 and encode(w)[0] != encode(" " + w)[0])
    for spelling in (word, " " + word):
        ids = encode(spelling)
        params = {"temperature": 0.0, "max_tokens": 3 * len(ids), "logits_processors": [wanting(*ids)], "ignore_eos": True}
        assert answers(llm, "a", SamplingParams(**params))[0].token_ids == ids * 3
        for given in (word, " " + word, ids):
            [answer] = answers(llm, "a", SamplingParams(bad_words=["zebra", given], **params))
            starts = [i for i in range(len(answer.token_ids)) if answer.token_ids[i : i + len(ids)] == ids]
            assert starts == []
            assert answer.token_ids[: len(ids) - 1] == ids[:-1]


def test_a_bad_word_never_comes_out_where_its_spelling_with_a_space_is_shorter(llm):
    tokenizer = llm.engine.tokenizer
    spaced_tokens = (tokenizer.decode([i]) for i in range(300, llm.info.vocab_size))
    word = next(
        text[1:]
        for text in spaced_tokens
        if text[:1] == " " and text[1:].isalpha() and len(tokenizer.encode(text)) == 1 and len(tokenizer.encode(text[1:])) > 1
    )
    [spaced], bare = tokenizer.encode(" " + word), tokenizer.encode(word)
    for given in (word, " " + word):
        params = {"temperature": 0.0, "max_tokens": 6, "bad_words": [given], "ignore_eos": True}
        said = answers(llm, "a", SamplingParams(logits_processors=[wanting(spaced)], **params))[0].token_ids
        assert spaced not in said
        said = answers(llm, "a", SamplingParams(logits_processors=[wanting(*bare)], **params))[0].token_ids
        assert said[: len(bare) - 1] == bare[:-1]
        assert said[: len(bare)] != bare


# ---- penalties


def by_the_book(logits, prompt, output, params):
    """The order of the design, for one row and in plain words: fp32 logits [vocab] -> fp32 logits [vocab]."""
    logits = logits.tolist()
    for i in range(VOCAB_SIZE):
        if i not in params.allowed_token_ids:
            logits[i] = -INF
    for word in params.bad_words:
        if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1]):
            logits[word[-1]] = -INF
    if len(output) < params.min_tokens:
        for i in params.stop_token_ids:
            logits[i] = -INF
    for i, bias in params.logit_bias.items():
        logits[i] += bias
    for i in set(prompt + output):
        logits[i] = logits[i] / params.repetition_penalty if logits[i] > 0 else logits[i] * params.repetition_penalty
    for i in set(output):
        logits[i] -= params.frequency_penalty * output.count(i)
        logits[i] -= params.presence_penalty
    both, size = prompt + output, params.no_repeat_ngram_size
    for start in range(len(both) - size + 1):
        if size and both[start : start + size - 1] == both[len(both) - size + 1 :]:
            logits[both[start + size - 1]] = -INF
    return logits


BOOK = {
    "allowed_token_ids": list(range(4, 96)),
    "bad_words": [[7], [8, 9], [30, 31, 32]],
    "logit_bias": {40: 1.0, 41: -1.0, 50: 0.5},
    "stop_token_ids": [60, 61, 62],
}
PENALTIES = [
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.1},
    {"presence_penalty": 1.5},
    {"presence_penalty": -0.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.4, "no_repeat_ngram_size": 2},
    {"repetition_penalty": 0.9, "frequency_penalty": 0.3, "presence_penalty": -0.2, "no_repeat_ngram_size": 3},
]


@pytest.mark.slow
def test_greedy_tokens_under_all_of_them_go_by_the_book(ids_llm, qwen3_path):
    prompt = random_prompt(9, seed=5)
    params = [asked(temperature=0.0, max_tokens=45, min_tokens=45, **BOOK, **given) for given in ({}, *PENALTIES)]
    expected = [[] for _ in params]
    for each, output in zip(params, expected, strict=True):
        for _ in range(45):
            row = by_the_book(oracle_logits(qwen3_path, prompt + output)[-1], prompt, output, each)
            best, second = sorted(row)[:-3:-1]
            assert best - second > 2e-5  # else rounding would choose
            output.append(row.index(best))
    assert len(set(map(tuple, expected))) == len(params)  # every one of them does something
    outputs = generate(ids_llm, [prompt] * len(params), params)
    assert [output.outputs[0].token_ids for output in outputs] == expected


# ---- the user's own functions


class Watching:
    """A logits processor that keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompt_ids, output_ids, logits):
        assert logits.shape == (VOCAB_SIZE,)
        assert logits.dtype == torch.float32
        self.calls.append((list(prompt_ids), list(output_ids), logits.clone()))
        prompt_ids.clear()  # nobody else is harmed by this
        output_ids.append(-1)
        return logits


@pytest.mark.parametrize("arguments", [{}, {"num_blocks": 9}, {"chunk_size": 3}], ids=str)
def test_a_processor_sees_its_own_prompt_and_output_and_what_masks_and_penalties_leave_at_each_step(qwen3_path, arguments):
    """The temperature and the filters come after it."""
    llm, watching = load(qwen3_path, **arguments), [Watching(), Watching()]
    prompts = [random_prompt(10), random_prompt(9, seed=1), random_prompt(3)]
    given = [BOOK | PENALTIES[-1] | {"temperature": 0.5, "top_k": 5, "min_tokens": 10}, BOOK | {"temperature": 0.0}, {}]
    params = [
        asked(logits_processors=[watch], **one) for watch, one in zip(watching, ({"n": 2} | given[0], given[1]), strict=True)
    ]
    params.append(asked())
    outputs = generate(llm, prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == [
        token_ids(llm, prompt, asked(**one)) for prompt, one in zip(prompts, given, strict=True)
    ]
    for output, watch, its_params in zip(outputs, watching, params, strict=False):
        expected = [answer.token_ids[:i] for answer in output.outputs for i in range(10)]
        assert sorted(seen for _, seen, _ in watch.calls) == sorted(expected)
        assert all(prompt == output.prompt_token_ids for prompt, _, _ in watch.calls)
        for prompt, seen, logits in watch.calls:
            expected = by_the_book(oracle_logits(qwen3_path, prompt + seen)[-1], prompt, seen, its_params)
            torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=0)
    assert any(output.metrics.num_preemptions for output in outputs) == ("num_blocks" in arguments)
    assert_nothing_is_left(llm)


def raising_at(num_calls, error):
    calls = []

    def function(*arguments):
        calls.append(None)
        if len(calls) == num_calls:
            raise error
        return arguments[-1] if len(arguments) == 3 else arguments[0]

    return function


@pytest.mark.parametrize(("num_calls", "n"), [(1, 1), (9, 3)])
def test_a_processor_that_raises_passes_its_error_on_and_the_llm_is_usable_afterwards(ids_llm, num_calls, n):
    prompts, params = [[1, 2, 3], [4, 5]], asked(n=n)
    expected = [output.outputs for output in generate(ids_llm, prompts, params)]
    stream = ids_llm.stream([7, 8], asked())
    first = next(stream).token_ids
    bad = asked(n=n, logits_processors=[raising_at(num_calls, LookupError("my own fault"))])
    with pytest.raises(LookupError, match="my own fault"):
        generate(ids_llm, prompts, [params, bad])
    rest = [i for delta in stream for i in delta.token_ids]
    assert first + rest == token_ids(ids_llm, [7, 8], asked())  # a stream that was under way took no harm
    assert_nothing_is_left(ids_llm)
    assert [output.outputs for output in generate(ids_llm, prompts, params)] == expected


@pytest.mark.parametrize("wrong", [lambda logits: logits[..., :-1], lambda logits: logits.tolist()], ids=["too few", "a list"])
def test_a_function_that_returns_another_shape_is_told_so_without_all_the_numbers(qwen3_path, ids_llm, wrong):
    with pytest.raises(InvalidTypeError, match=rf"processor must return logits of shape \({VOCAB_SIZE},\), got ") as of_one:
        generate(ids_llm, [[1, 2]], asked(logits_processors=[lambda prompt_ids, output_ids, logits: wrong(logits)]))
    assert_nothing_is_left(ids_llm)

    def my_stage(logits, batch):
        return wrong(logits)

    llm = load(qwen3_path, stages=[my_stage, *STAGES])
    with pytest.raises(InvalidTypeError, match=rf"my_stage must return logits of shape \(1, {VOCAB_SIZE}\), got ") as of_other:
        generate(llm, [[1, 2]], asked())
    assert_nothing_is_left(llm)
    assert max(len(str(caught.value)) for caught in (of_one, of_other)) < 300


def only_even_ids(logits, batch):
    logits = logits.clone()
    logits[:, 1::2] = -INF
    return logits


@pytest.mark.parametrize("stages", [[*STAGES, only_even_ids], [only_even_ids, *STAGES]], ids=["last", "first"])
def test_a_stage_of_ones_own_acts_on_greedy_and_on_sampled_rows(qwen3_path, ids_llm, stages):
    llm = load(qwen3_path, stages=stages)
    more = [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9, "n": 2}, {"temperature": 0.0, "presence_penalty": 1}]
    params = [asked(**given) for given in more]
    prompts = [random_prompt(4, seed=i) for i in range(5)]
    said = [i for output in generate(llm, prompts, params) for answer in output.outputs for i in answer.token_ids]
    assert {i % 2 for i in said} == {0}
    plain = [i for output in generate(ids_llm, prompts, params) for answer in output.outputs for i in answer.token_ids]
    assert {i % 2 for i in plain} == {0, 1}
    greedy = token_ids(llm, [1, 2], asked(temperature=0.0))
    assert greedy == (oracle_logits(qwen3_path, [1, 2, *greedy])[1:-1, ::2].argmax(-1) * 2).tolist()


# ---- all of it at once
