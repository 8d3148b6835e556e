"""Reasoning budgets, repetitions and given log-probabilities: the same answers alone, together, with drafts and preempted."""

import random
from dataclasses import replace

import pytest

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams, parse_chat_answer
from nanoinfer.errors import InvalidValueError
from tests.helpers import tiny_models
from tests.helpers.tool_cases import TOOLS

pytestmark = pytest.mark.slow

SMALL = {"kv_cache_memory": 2**20, "block_size": 8, "seed": 0, "batch_invariant": True}
FREE = {"thinking_token_budget": None, "repetition_detection": None, "logprob_token_ids": None}


@pytest.fixture(scope="module")
def llm(tools_path):
    return LLM(tools_path, **SMALL)


@pytest.fixture(scope="module")
def tags(llm):
    return llm.get_tokenizer().convert_tokens_to_ids(["<think>", "</think>"])


def requests_of(llm, tags, num=24):
    """Prompts and parameters. Many answers think, in a vocabulary so small that they repeat themselves."""
    rng, (begin, end), requests = random.Random(3), tags, []
    line_break = llm.get_tokenizer().encode("\n", add_special_tokens=False)
    for seed in range(num):
        few = rng.sample(range(300, 400), rng.choice([2, 20]))
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0, 1.5]),
            seed=seed,
            max_tokens=rng.randrange(12, 30),
            allowed_token_ids=[*few, begin, end],
            logit_bias={begin: rng.choice([0, 12]), end: rng.choice([-100, 0, 6])},
            thinking_token_budget=rng.choice([None, 0, 1, 2, 7]),
            repetition_detection=rng.choice([None, {"max_pattern_size": 3, "min_count": rng.choice([2, 3])}]),
            logprob_token_ids=rng.choice([None, few[:2]]),
            detokenize=False,
        )
        ends = [[], [begin], [begin, *line_break], [begin, end, *line_break]]
        prompt = [rng.choice([*few, end]) for _ in range(rng.randrange(1, 30))]  # so that drafts may end reasoning
        requests.append((prompt + rng.choice(ends), params))
    return requests


def answers_of(llm, requests):
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    tiny_models.assert_nothing_is_left(llm)
    answers = [(one.token_ids, one.finish_reason, one.logprobs) for output in outputs for one in output.outputs]
    return answers, sum(output.metrics.num_preemptions for output in outputs)


def test_an_answer_is_the_free_one_up_to_its_limits(llm, tags):
    """The reasoning goes on as without a budget until it ends, and the answer until its first repetition."""
    begin, end = tags
    requests = requests_of(llm, tags)
    free = [(prompt, replace(params, **FREE, logprobs=None if params.logprobs is None else -1)) for prompt, params in requests]
    num_ended = num_repeated = num_listed = 0
    for (prompt, params), (token_ids, reason, logprobs), (expected, _, everything) in zip(
        requests, answers_of(llm, requests)[0], answers_of(llm, free)[0], strict=True
    ):
        budget = params.thinking_token_budget
        text = llm.get_tokenizer().decode(prompt[-5:]).rstrip()
        start = 0 if text.endswith("<think>") else 1 if expected[0] == begin and not text.endswith("</think>") else None
        if start is not None and budget is not None and end not in expected[start : start + budget + 1]:
            expected = expected[: start + budget]
            assert token_ids[len(expected) : len(expected) + 1] in ([end], [])
            num_ended += len(token_ids) > len(expected)
        assert token_ids[: len(expected)] == expected[: len(token_ids)]
        if detection := params.repetition_detection:
            repeats = [num for num in range(1, len(token_ids) + 1) if detection.ends(token_ids[:num])]
            assert repeats == ([len(token_ids)] if reason == "repetition" else [])
        num_repeated += reason == "repetition"
        assert reason == "length" or detection
        if given := params.logprob_token_ids:
            assert [list(position) for position in logprobs] == [list(dict.fromkeys([one, *given])) for one in token_ids]
            for position, whole in list(zip(logprobs, everything, strict=False))[: len(expected)]:
                assert position == {token_id: whole[token_id] for token_id in position}
            num_listed += 1
        else:
            assert logprobs is None
    assert min(num_ended, num_repeated, num_listed) > 5


WAYS = {
    "alone": {"max_num_seqs": 1},
    "async": {"async_scheduling": True},
    "preempted": {"kv_cache_memory": 2**17},
    "ngram": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}},
    "draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4, "adaptive": False}},
}


@pytest.mark.parametrize("way", [*list(WAYS)[:4], pytest.param("draft model", marks=pytest.mark.long)])
def test_the_answers_are_the_same(way, llm, tags, tools_path):
    settings = WAYS[way]
    if way == "draft model":
        settings = {"speculative_config": settings["speculative_config"] | {"model": str(tools_path)}}
    other, requests = LLM(tools_path, **SMALL | settings), requests_of(llm, tags)
    if way == "async":  # log-probabilities make each step wait
        requests = [request for request in requests if request[1].logprobs is None]
    answers, num_preemptions = answers_of(other, requests)
    assert answers == answers_of(llm, requests)[0]
    assert (num_preemptions > 0) == (way == "preempted")
    if "speculative_config" in settings:
        assert other.engine.planner.counts.num_accepted_tokens > 20


def test_the_answers_are_the_same_with_drafts_that_are_right(llm, tags, tools_path, monkeypatch):
    """All drafts are accepted, those that end reasoning before its budget, too."""
    other = LLM(tools_path, **SMALL, speculative_config={"method": "ngram", "num_speculative_tokens": 8, "adaptive": False})
    requests = requests_of(llm, tags)
    expected, _ = answers_of(llm, requests)
    token_ids = {params.seed: answer[0] for (_, params), answer in zip(requests, expected, strict=True)}

    def propose(sequences, limits):
        at = [slice(seq.num_output_tokens, seq.num_output_tokens + limit) for seq, limit in zip(sequences, limits, strict=True)]
        return [token_ids[seq.seed][place] for seq, place in zip(sequences, at, strict=True)]

    monkeypatch.setattr(other.engine.planner.proposer, "propose", propose)
    assert answers_of(other, requests)[0] == expected
    metrics = other.engine.planner.counts
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 200


def test_each_of_several_answers_has_a_budget_of_its_own(llm, tags):
    begin, end = tags
    params = SamplingParams(n=4, seed=1, max_tokens=20, thinking_token_budget=6, logit_bias={end: 6}, detokenize=False)
    answers = llm.generate([[5, begin]], params, use_tqdm=False)[0].outputs
    ends = [answer.token_ids.index(end) for answer in answers]
    assert max(ends) == 6
    assert len(set(ends)) > 1


@pytest.mark.parametrize("tool_choice", ["none", "auto"])
def test_the_format_of_a_chat_with_a_budget_follows_the_thought(llm, tags, tool_choice):
    begin, end = tags
    params = SamplingParams(
        temperature=0.0,
        max_tokens=40,
        logit_bias={begin: 100},
        thinking_token_budget=5,
        structured_outputs=StructuredOutputsParams(choice=["Oslo", "Paris"]),
    )
    chat = [{"role": "user", "content": "Where?"}]
    [answer] = llm.chat(chat, params, tools=TOOLS, tool_choice=tool_choice)[0].outputs
    assert answer.token_ids[:7] == [begin] * 6 + [end]
    assert parse_chat_answer(answer.text)["content"] in ("Oslo", "Paris")
    [answer] = llm.chat(chat, replace(params, thinking_token_budget=None))[0].outputs
    assert answer.text in ("Oslo", "Paris")
    closed = {"enable_thinking": False}
    [answer] = llm.chat(chat, params, chat_template_kwargs=closed)[0].outputs
    assert answer.text in ("Oslo", "Paris")


def test_without_the_token_that_ends_reasoning_a_budget_is_refused(qwen3_path):
    with pytest.raises(InvalidValueError, match="thinking_token_budget=5 needs a tokenizer with the token </think>"):
        LLM(qwen3_path, **SMALL).generate([[5]], SamplingParams(thinking_token_budget=5, detokenize=False))
