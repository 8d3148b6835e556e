"""Prompts in every form become checked requests, without a model and without a queue."""

from dataclasses import replace

import numpy
import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.inputs import InputProcessor, RequestFeature, as_list, one_per_prompt
from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError, NanoinferError
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.scheduling.sequence import Constraint

PARAMS = SamplingParams(detokenize=False)


def processor(**more):
    info = ExecutorInfo(vocab_size=50, max_position_embeddings=32, max_model_len=16, num_blocks=4, block_size=4)
    return InputProcessor(info, None, EngineConfig(), **more)


@pytest.mark.parametrize(
    "prompt",
    [[3, 4], (3, 4), [numpy.int64(3), 4], {"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [3, 4], "prompt": None}],
    ids=str,
)
def test_token_ids_in_every_form_are_a_list_of_ints(prompt):
    prepared = processor().prepare(prompt, PARAMS)
    assert prepared.prompt_token_ids == [3, 4]
    assert {type(token_id) for token_id in prepared.prompt_token_ids} == {int}
    assert (prepared.prompt, prepared.error, prepared.cache_salt) == (None, None, None)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], InvalidPromptError, "the prompt has no tokens"),
        ([3, 50], InvalidPromptError, r"the prompt has the token id 50; this model's ids are 0 \.\. 49"),
        ([-1], InvalidPromptError, "the token id -1"),
        ([True], InvalidTypeError, "a prompt must be a string, a list of token ids"),
        (numpy.array([3]), InvalidTypeError, "a prompt must be a string, a list of token ids"),
        ("Once", InvalidPromptError, "no tokenizer is loaded"),
        ({"prompt_token_ids": [3], "other": 1}, InvalidPromptError, "a prompt's dict holds prompt"),
        ({}, InvalidPromptError, "a prompt's dict holds prompt"),
        ({"prompt_token_ids": [3], "cache_salt": ""}, InvalidPromptError, "cache_salt must be a non-empty string"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(prompt, error, message):
    with pytest.raises(error, match=message):
        processor().prepare(prompt, PARAMS)


def test_a_prompt_that_leaves_no_room_for_a_token_ends_with_an_error_and_raises_nothing():
    assert processor().prepare([1] * 15, PARAMS).error is None
    error = processor().prepare([1] * 16, PARAMS).error
    assert "16 tokens, and the answer needs at least one" in error.message
    assert (error.num_tokens, error.max_tokens) == (16, 16)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [50]}, "stop_token_ids has the token id 50"),
        ({"logit_bias": {99: 1.0}}, "logit_bias has the token id 99"),
        ({"logprobs": 51}, "logprobs must be at most the vocabulary's 50, got 51; use -1 for all"),
        ({"extra_args": {"a": 1}}, "nothing reads extra_args"),
        ({"detokenize": True}, "so there can be no text; set detokenize=False"),
    ],
    ids=str,
)
def test_parameters_that_this_model_cannot_serve_are_refused(params, message):
    with pytest.raises(InvalidValueError, match=message):
        processor().prepare([3], SamplingParams(**{"detokenize": False} | params))


def test_a_priority_needs_a_scheduler_that_reads_it():
    assert processor(accepts_priority=True).prepare([3], PARAMS, priority=5).priority == 5
    assert processor().prepare([3], PARAMS, priority=0).priority == 0
    with pytest.raises(InvalidValueError, match="priority=5 has no effect with this scheduler"):
        processor().prepare([3], PARAMS, priority=5)


def test_an_option_that_no_feature_takes_out_is_refused():
    class Reader(RequestFeature):
        def prepare(self, prepared, options):
            return replace(prepared, extras={"read": options.pop("lora_request", None)})

    assert processor(features=[Reader()]).prepare([3], PARAMS, lora_request=7).extras == {"read": 7}
    assert processor().prepare([3], PARAMS, lora_request=None).extras == {}
    for given, message in (
        ({"lora_request": 7}, "lora_request=7 needs a model loaded with"),
        ({"other": 0}, "read by nothing"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            processor().prepare([3], PARAMS, **given)


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"thinking_token_budget": 0}, {"bad_words": [[3]]}], ids=str)
def test_an_engine_without_features_refuses_what_only_features_read(params):
    [name] = params
    with pytest.raises(InvalidValueError, match=f"{name}=.* is read by nothing; leave it out"):
        processor().prepare([3], SamplingParams(detokenize=False, **params))


def test_a_request_that_was_compiled_is_not_compiled_again():
    made = replace(processor().prepare([3], PARAMS), compile=Constraint)
    compiled = processor().compile(made)
    assert len(compiled.constraints) == 1
    assert processor().compile(compiled) == compiled


def test_an_error_names_the_prompt():
    with pytest.raises(InvalidPromptError, match="prompt 1: the prompt has no tokens"):
        processor().prepare_all([[3], []], PARAMS)
    with pytest.raises(InvalidValueError, match="priority must be one, or one per prompt"):
        processor(accepts_priority=True).prepare_all([[3], [4]], PARAMS, priority=[1])


def test_a_list_of_ids_is_one_prompt_and_a_list_of_lists_several():
    assert as_list([3, 4]) == [[3, 4]]
    assert as_list([[3], [4]]) == [[3], [4]]
    assert as_list([]) == []
    with pytest.raises(InvalidTypeError, match="prompts must be"):
        as_list(5)


def test_parameters_are_one_for_all_or_one_for_each():
    assert list(one_per_prompt(PARAMS, 2)) == [PARAMS, PARAMS]
    assert list(one_per_prompt([PARAMS], 1)) == [PARAMS]
    for wrong in ([PARAMS], "a"):
        with pytest.raises(NanoinferError, match="sampling_params must be"):
            one_per_prompt(wrong, 2)
