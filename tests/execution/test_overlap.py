"""With async_scheduling a step is launched before the tokens of the step before are read, whatever a request asks for."""

from itertools import pairwise
from unittest import mock

import pytest

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams

PROMPTS = ["The cat sat", "A", "Once upon a time there was"]
COUNTED = {"repetition_penalty": 1.4, "frequency_penalty": -1.5, "presence_penalty": -0.7, "logprobs": 2}
WORDS = StructuredOutputsParams(regex="([a-z]{1,3} ){2,6}")
ASKED = {
    "nothing": {},
    "log-probabilities": {"logprobs": 3},
    "given ids": {"logprobs": 0, "logprob_token_ids": [5, 9]},
    "masks": {"top_k": 7, "return_sampling_mask": True, "logprobs": 1},
    "penalties": COUNTED,
    "lists": {"min_tokens": 5, "stop_token_ids": [3, 7], "logit_bias": {5: 1.0, 11: 3.0}, "allowed_token_ids": [*range(90)]},
    "bad words": {"bad_words": ["a", " the"], "no_repeat_ngram_size": 2},
    "a grammar": {"structured_outputs": WORDS},
    "all": COUNTED | {"structured_outputs": WORDS, "no_repeat_ngram_size": 3, "logprobs": 2, "min_tokens": 4},
}


def run(asked, *, is_async, which=lambda i: True):
    """The answers, and what was launched and collected, in order, with the plan. which: the requests that ask."""
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=9 + 3 * i, **(asked if which(i) else {"ignore_eos": True}))
        for i in range(len(PROMPTS))
    ]
    llm = LLM("tiny-qwen3", dtype="float32", kv_cache_memory=2**22, async_scheduling=is_async, logprobs_mode="processed")
    executor, events = llm.engine.executor, []
    launch, collect = executor.launch, executor.collect

    def noted_launch(plan, previous):
        events.append(("launch", plan))
        return launch(plan, previous)

    def noted_collect(step):
        events.append(("collect", step.plan))
        return collect(step)

    with mock.patch.multiple(executor, launch=noted_launch, collect=noted_collect):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [(answer.token_ids, answer.logprobs, answer.sampling_mask, answer.finish_reason) for answer in answers], events


def waits(events):
    """How often a step was collected right after its launch."""
    pairs = pairwise(events)
    return sum((one, other) == ("launch", "collect") and plan is last for (one, plan), (other, last) in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_the_answers_are_those_without_overlap_and_no_step_waits_for_the_tokens_of_the_one_before(name):
    if "structured_outputs" in ASKED[name]:
        pytest.importorskip("llguidance")
    for which in (lambda i: True, lambda i: i == 1):
        expected, _ = run(ASKED[name], is_async=False, which=which)
        answers, events = run(ASKED[name], is_async=True, which=which)
        assert answers == expected
        assert waits(events) == 0
        assert len({token_id for answer in answers for token_id in answer[0]}) > 4  # which the parameters change


def test_a_function_of_a_user_reads_every_token_before_the_next_step():
    asked = {"logits_processors": [lambda prompt, output, logits: logits + len(output)]}
    answers, events = run(asked, is_async=True)
    assert answers == run(asked, is_async=False)[0]
    assert waits(events) == len(events) // 2
