"""The formats of answers and the detection of repetitions are checked when they are given."""

import re

import pytest

from nanoinfer import NanoinferError, SamplingParams, StructuredOutputsParams
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from nanoinfer.sampling_params import RepetitionDetectionParams

FORMATS = {"json": {"type": "object"}, "regex": "[a-z]+", "choice": ["a", "b"], "grammar": 'start: "a"', "json_object": True}


def test_one_format_is_enough_and_is_named_and_kept_as_it_was_when_it_was_given():
    for kind, value in FORMATS.items():
        assert StructuredOutputsParams(**{kind: value}).kind == kind
    schema = {"type": "object"}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert params.json == '{"type": "object"}' == StructuredOutputsParams(json='{"type":"object"}').json
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")


REFUSED = [
    ({}, InvalidValueError, "needs exactly one of json, regex, choice, grammar, json_object, got none"),
    ({"json_object": False}, InvalidValueError, "exactly one of json, regex, choice, grammar, json_object, got none"),
    ({"regex": "a", "choice": ["a"]}, InvalidValueError, "got regex and choice"),
    ({"json": 5}, InvalidTypeError, "json must be a JSON schema, as a dict or as text, got int; of a pydantic model"),
    ({"json": dict}, InvalidTypeError, "pass Model.model_json_schema()"),
    ({"json": "{"}, InvalidValueError, "json is not a JSON schema"),
    ({"json": {"a": float("nan")}}, InvalidValueError, "json is not a JSON schema"),
    ({"json": "[1]"}, InvalidValueError, "json must be an object such as "),
    ({"regex": 5}, InvalidTypeError, "regex must be a string, got 5"),
    ({"choice": "ab"}, InvalidTypeError, "choice must be a list of strings, got 'ab'"),
    ({"choice": ["a", 1]}, InvalidTypeError, "choice must be a list of strings"),
    ({"choice": []}, InvalidValueError, "choice must hold at least one string, and no empty one"),
    ({"choice": ["a", ""]}, InvalidValueError, "and no empty one"),
    ({"json_object": 1}, InvalidTypeError, "json_object must be True or False, got 1"),
    ({"regex": "a", "disable_any_whitespace": "no"}, InvalidTypeError, "disable_any_whitespace must be True or False"),
    ({"whitespace_pattern": " *", "json_object": True}, UnsupportedError, "whitespace_pattern"),
    ({"regexp": "a"}, InvalidTypeError, "did you mean regex"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_values_of_the_wrong_type_or_without_an_answer_are_refused(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        StructuredOutputsParams(**given)


UNDETECTED = [
    ({"max_pattern_size": 3}, "min_count must be >= 2 with max_pattern_size, got 0"),
    ({"max_pattern_size": 3, "min_count": 1}, "min_count must be >= 2 with max_pattern_size, got 1"),
    ({"min_pattern_size": 2}, "min_pattern_size must be at most max_pattern_size, got 2 and 0"),
    ({"max_pattern_size": -1}, "max_pattern_size must be >= 1, or 0 to turn it off, got -1"),
    ({"max_patern_size": 1}, "did you mean max_pattern_size?"),
    ({1: 2}, "has no argument '1'"),
]


@pytest.mark.parametrize(("given", "message"), UNDETECTED, ids=str)
def test_a_detection_may_be_a_dict_and_one_that_detects_nothing_is_refused(given, message):
    params = SamplingParams(repetition_detection={"max_pattern_size": 3, "min_count": 2})
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=3, min_count=2)
    assert SamplingParams(repetition_detection=RepetitionDetectionParams()).repetition_detection is None
    with pytest.raises(NanoinferError, match=re.escape(message)):
        SamplingParams(repetition_detection=given)
