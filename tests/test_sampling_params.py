"""Every parameter is checked when it is given: what is out of range, of a wrong type, contradictory or not built is refused."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy
import pytest

from nanoinfer import NanoinferError, SamplingParams
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError

NAN, INF = math.nan, math.inf

# name, value, what the message must say is allowed
OUT_OF_RANGE = [
    *[("temperature", value, "finite and >= 0") for value in (-0.1, -1, NAN, INF, -INF)],
    *[("top_p", value, "in (0, 1]") for value in (0, -0.5, 1.0001, 2, NAN, INF, -INF)],
    *[("min_p", value, "in [0, 1]") for value in (-0.01, 1.01, NAN, INF, -INF)],
    *[("top_k", value, ">= 1, or 0 or -1") for value in (-2, -100)],
    *[("seed", value, "in 0 .. 2**64 - 1") for value in (-2, 2**64, -(2**63))],
    *[("max_tokens", value, ">= 1, or None") for value in (0, -1)],
    *[("min_tokens", value, ">= 0") for value in (-1, -16)],
    *[("stop", value, "not hold an empty string") for value in ("", ["a", ""], [""])],
    *[("stop_token_ids", value, ">= 0") for value in ([-1], [3, -7])],
]
WRONG_TYPE = [
    *[
        (name, value, "a number")
        for name in ("temperature", "top_p", "min_p")
        for value in ("0.5", None, True, False, [1.0], 1j)
    ],
    *[(name, value, "an integer") for name in ("top_k", "min_tokens") for value in (1.0, 2.5, "3", None, True, NAN, INF)],
    *[(name, value, "an integer") for name in ("seed", "max_tokens") for value in (1.0, "3", True, False, NAN, INF)],
    *[("stop", value, "a string or a list of strings") for value in (5, b"end", [1], {"a"}, ["a", None], True)],
    *[("stop_token_ids", value, "a list of token ids") for value in (5, "ab", b"ab", {1, 2}, True)],
    *[("stop_token_ids", value, "an integer") for value in ([1.0], ["a"], [True], [None], [1, NAN])],
    *[
        (name, value, "True or False")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
        for value in (1, 0, "yes", None, NAN)
    ],
]
# name -> (values that ask for something, values that are off)
NOT_BUILT = {
    "n": ((2, 0, -1, NAN, "1", None), (1,)),
    "repetition_penalty": ((1.1, 0.9, 0, NAN, INF, None), (1.0, 1)),
    "presence_penalty": ((0.5, -0.5, NAN, INF, None), (0.0, 0)),
    "frequency_penalty": ((0.5, -0.5, NAN, INF, None), (0.0, 0)),
    "no_repeat_ngram_size": ((1, 3, -1, NAN, None), (0,)),
    "logit_bias": (({1: 2.0}, [1], "x"), (None, {})),
    "allowed_token_ids": (([1], []), (None,)),
    "bad_words": ((["a"], [[1, 2]], "a"), (None, [])),
    "logprobs": ((0, 1, -1, False), (None,)),
    "prompt_logprobs": ((0, 1, -1, False), (None,)),
    "logits_processors": (([print], print), (None, [])),
}
BUILT = {
    "temperature": (0, 0.0, 1e-300, 1, 2.5, 1e300, numpy.float32(0.5)),
    "top_p": (5e-324, 0.5, 1, 1.0),
    "min_p": (0, 0.0, 0.5, 1, 1.0),
    "top_k": (-1, 0, 1, 50, 10**9, numpy.int64(3)),
    "seed": (None, -1, 0, 2**63, 2**64 - 1),
    "max_tokens": (None, 1, 10**9),
    "min_tokens": (0, 1, 16),
    "stop": (None, "a", [], ["a", "bc"], ("a",), " "),
    "stop_token_ids": (None, [], [0], (3, 4), range(2)),
    "include_stop_str_in_output": (True, False),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "detokenize": (True, False),
}


def ids(cases):
    return [f"{name}={value!r}" for name, value, *_ in cases]


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE, ids=ids(OUT_OF_RANGE))
def test_a_value_out_of_range_is_refused_by_name_value_and_range(name, value, allowed):
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, NanoinferError)
    assert isinstance(caught.value, ValueError)
    bad = next(token_id for token_id in value if token_id < 0) if name == "stop_token_ids" else value
    assert name in str(caught.value)
    assert f"got {bad!r}" in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG_TYPE, ids=ids(WRONG_TYPE))
def test_a_value_of_the_wrong_type_is_refused_by_name_value_and_type(name, value, allowed):
    with pytest.raises(InvalidTypeError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, NanoinferError)
    assert isinstance(caught.value, TypeError)
    bad = value[-1] if allowed == "an integer" and isinstance(value, list) else value
    assert name in str(caught.value)
    assert f"got {bad!r}" in str(caught.value)
    assert allowed in str(caught.value)


CASES_ON = [(name, value) for name, (on, _) in NOT_BUILT.items() for value in on]
CASES_OFF = [(name, value) for name, (_, off) in NOT_BUILT.items() for value in off]
CASES_BUILT = [(name, value) for name, values in BUILT.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES_ON, ids=ids(CASES_ON))
def test_a_parameter_that_is_not_built_is_refused_when_it_is_on(name, value):
    with pytest.raises(UnsupportedError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, NanoinferError)
    assert isinstance(caught.value, ValueError)
    assert f"{name}={value!r}" in str(caught.value)
    assert f"leave it out (it acts as {getattr(SamplingParams(), name)!r})" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), CASES_OFF + CASES_BUILT, ids=ids(CASES_OFF + CASES_BUILT))
def test_a_value_in_range_is_accepted(name, value):
    SamplingParams(**{name: value})


def test_the_tables_above_know_every_parameter():
    assert {field.name for field in fields(SamplingParams)} == {*BUILT, *NOT_BUILT}


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_min_tokens_beyond_max_tokens_is_refused_and_equality_is_not():
    with pytest.raises(InvalidValueError, match=r"min_tokens=17 and max_tokens=16"):
        SamplingParams(min_tokens=17)  # the default max_tokens counts
    SamplingParams(min_tokens=16)
    SamplingParams(min_tokens=1000, max_tokens=None)


def test_stop_strings_without_text_are_refused_and_no_stop_strings_are_not():
    with pytest.raises(InvalidValueError, match=r"stop=\('END',\) needs text, but detokenize=False; use stop_token_ids"):
        SamplingParams(stop="END", detokenize=False)
    SamplingParams(stop=[], detokenize=False)
    SamplingParams(stop_token_ids=[1], detokenize=False)


def test_a_params_object_cannot_be_changed_after_its_check():
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.temperature = -1.0
    with pytest.raises(InvalidValueError):
        replace(params, temperature=-1.0)
    assert replace(params, temperature=0.5, stop="a").stop == ("a",)


def test_a_list_given_can_be_changed_later_without_changing_the_params():
    stop, stop_token_ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids)
    stop.append("b")
    stop_token_ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


def test_every_way_to_say_the_same_gives_equal_params():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams(top_k=-1).top_k == SamplingParams(top_k=0).top_k == 0
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=None).stop_token_ids == SamplingParams(stop_token_ids=[]).stop_token_ids == ()
    assert SamplingParams(stop="ab", seed=-1, top_k=-1) == SamplingParams(stop=("ab",))
    assert SamplingParams(seed=1) != SamplingParams(seed=2)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (-0.0, True), (1e-300, False), (1, False)])
def test_only_temperature_zero_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_an_integer_too_large_for_a_float_is_refused_as_out_of_range(name):
    with pytest.raises(InvalidValueError, match=f"{name} must be"):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize("name", ["logit_bias", "n", "bad_words"])
def test_an_array_for_a_parameter_that_is_not_built_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=f"{name}=.* is not built yet"):
        SamplingParams(**{name: numpy.array([1, 2])})


def test_numpys_numbers_become_plain_ones():
    params = SamplingParams(
        seed=numpy.uint64(2**63), temperature=numpy.float32(0.5), top_k=numpy.int64(3), max_tokens=numpy.int32(4)
    )
    assert [type(value) for value in (params.seed, params.temperature, params.top_k, params.max_tokens)] == [
        int,
        float,
        int,
        int,
    ]


def test_an_unknown_argument_is_named_with_the_one_that_was_meant():
    with pytest.raises(InvalidTypeError, match="SamplingParams has no argument 'temprature'; did you mean temperature"):
        SamplingParams(temprature=0.5)
    with pytest.raises(InvalidTypeError, match="no argument 'best_of'; known are temperature, top_k"):
        SamplingParams(best_of=2)
    with pytest.raises(InvalidTypeError, match=r"keyword arguments only, got \(0.5,\); write temperature=0.5"):
        SamplingParams(0.5)


def test_params_can_be_copied_and_pickled():
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params
