"""Every parameter is checked when it is given: what is out of range, of a wrong type or contradictory is refused by name."""

import copy
import math
import pickle
import re
from dataclasses import fields, replace
from typing import get_type_hints

import numpy
import pytest

from nanoinfer import NanoinferError, SamplingParams, StructuredOutputsParams
from nanoinfer.compat.vllm import neutral
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from nanoinfer.sampling_params import BeamSearchParams, RepetitionDetectionParams, RequestOutputKind, over_default

NEUTRAL = neutral.NEUTRAL["SamplingParams"]
NAN, INF = math.nan, math.inf


def each(name, values, allowed):
    """Rows of the tables below: name, value, what the message says it got, what it says is allowed."""
    return [(name, value, value, allowed) for value in values]


OUT_OF_RANGE = [
    *each("temperature", (-0.1, -1, -5e-324, NAN, INF, -INF), "finite and >= 0; 0 is greedy"),
    *each("top_p", (0, -0.5, 1.0001, 2, NAN, INF, -INF), "in (0, 1]"),
    *each("min_p", (-0.01, 1.01, NAN, INF, -INF), "in [0, 1]; use 0"),
    *each("top_k", (-2, -100), ">= 1, or 0 or -1 to turn it off"),
    *each("seed", (-2, 2**64, -(2**63)), "in 0 .. 2**64 - 1, or None or -1 to draw one"),
    *each("max_tokens", (0, -1), ">= 1, or None for the model's length"),
    *each("min_tokens", (-1, -16), ">= 0"),
    *each("thinking_token_budget", (-2, -100), ">= 0, or None or -1 for no limit"),
    *each("timeout", (0, -1, NAN, INF), "> 0 seconds; leave it out"),
    *each("stop", ("", ["a", ""], [""]), "not hold an empty string"),
    *[("stop_token_ids", value, value[-1], ">= 0") for value in ([-1], [3, -7])],
    *each("n", (0, -1, 16385, 10**9), "in 1 .. 16384"),
    *each("repetition_penalty", (0, 0.0, -0.5, NAN, INF, -INF), "finite and > 0; use 1.0"),
    *each("presence_penalty", (-2.0001, 2.0001, 100, NAN, INF, -INF), "in [-2, 2]; use 0"),
    *each("frequency_penalty", (-2.0001, 2.0001, -100, NAN, INF, -INF), "in [-2, 2]; use 0"),
    *each("no_repeat_ngram_size", (-1, -3), ">= 1, or 0 to turn it off"),
    *each("logprobs", (-2, -100), ">= 0, -1 for all, or None to turn it off"),
    *each("prompt_logprobs", (-2, -100), ">= 0, -1 for all, or None to turn it off"),
    *[("logit_bias", {5: value}, value, "in [-100, 100]") for value in (-100.5, 101, 10**400, NAN, INF, -INF)],
    *[("logit_bias", {1: 100, value: 1}, value, ">= 0") for value in (-1, -(2**63))],
    *each("allowed_token_ids", ([],), "hold at least one id"),
    *[("allowed_token_ids", value, value[-1], ">= 0") for value in ([-1], [3, -7])],
    *[("logprob_token_ids", value, value[-1], ">= 0") for value in ([-1], [3, -7])],
    *[("bad_words", value, value[-1], "not hold an empty word") for value in ([""], ["a", ""], ["a", " "], ["\n\t"])],
    *[("bad_words", value, (), "not hold an empty word") for value in ([[]], ["a", ()], [[1], []])],
    *[("bad_words", value, -1, ">= 0") for value in ([[-1]], ["a", [2, -1]])],
    *each("output_kind", ("all", "", None, 1), "one of cumulative, delta, final_only"),
]
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "min_tokens", "n", "no_repeat_ngram_size")
INTEGERS_OR_NONE = ("seed", "max_tokens", "thinking_token_budget", "logprobs", "prompt_logprobs")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "return_sampling_mask")
ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
NO_IDS = ([1.0], ["a"], [3, True], [None], [1, NAN])
WRONG_TYPE = [
    *[row for name in NUMBERS for row in each(name, ("0.5", None, True, False, [1.0], {}, 1j), "a number")],
    *each("extra_args", ([1], "x", 5, True, NAN), "a dict"),
    *each("timeout", ("5", True, [1.0]), "a number"),
    *[row for name in INTEGERS for row in each(name, (1.0, 2.5, "3", None, True, False, [1], NAN, INF), "an integer")],
    *[row for name in INTEGERS_OR_NONE for row in each(name, (1.0, "3", [1], NAN, INF), "an integer")],
    *[row for name in ("seed", "max_tokens") for row in each(name, (True, False), "an integer")],
    *[row for name in FLAGS for row in each(name, (1, 0, "yes", None, [True], NAN), "True or False")],
    *each("stop", (5, b"end", [1], {"a"}, ["a", None], True, NAN), "a string or a list of strings"),
    *[row for name in ID_LISTS for row in each(name, (5, "ab", b"ab", {1, 2}, True, NAN, INF), "a list of token ids")],
    *[(name, value, value[-1], "an integer") for name in ID_LISTS for value in NO_IDS],
    *each("logit_bias", ([1], [(1, 2.0)], "x", 5, {1, 2}, True, NAN), "a dict of token ids and numbers"),
    *[("logit_bias", {key: 1.0}, key, "an integer") for key in ("5", 1.0, True, None, (1,), INF)],
    *[("logit_bias", {5: value}, value, "a number") for value in ("1", None, True, [1.0], 1j)],
    *each("bad_words", ("a", b"a", 5, {"a"}, True, NAN), "a list of strings and lists of token ids"),
    *[("bad_words", ["a", value], value, "a string or a list of token ids") for value in (5, 5.0, b"a", True, {1}, None)],
    *[("bad_words", [value], value[-1], "an integer") for value in NO_IDS],
    *each("logits_processors", (print, "ab", 5, [5], [print, None], {print}, True, NAN), "a list of functions"),
    *each("repetition_detection", (5, "3", [3], True, NAN), "RepetitionDetectionParams or a dict"),
    *each("structured_outputs", ("json", {"json": {}}, 5, [], True, NAN), "StructuredOutputsParams"),
]
ACCEPTED = {
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
    "return_sampling_mask": (True, False),
    "n": (1, 2, 1000, numpy.int32(2)),
    "repetition_penalty": (1, 1.0, 1.3, 0.5, 5e-324, 1e300),
    "presence_penalty": (0, -2, 2, 0.5),
    "frequency_penalty": (0, -2, 2, -0.5),
    "no_repeat_ngram_size": (0, 1, 3, 10**9),
    "logit_bias": (None, {}, {1: 2}, {0: -100, 5: 100.0}, {numpy.int64(3): numpy.float32(0.5)}),
    "allowed_token_ids": (None, [0], (3, 4), range(2), [1, 1]),
    "bad_words": (None, [], ["a"], [[1, 2]], ("a", (1, 2), [3]), [" a"]),
    "logprobs": (None, -1, 0, 1, 20),
    "thinking_token_budget": (None, -1, 0, 1, 10**9),
    "repetition_detection": (None, {}, {"max_pattern_size": 3, "min_count": 2}, RepetitionDetectionParams(max_pattern_size=0)),
    "logprob_token_ids": (None, [], [0], (3, 4), range(2), [1, 1]),
    "prompt_logprobs": (None, -1, 0, 1, 20),
    "logits_processors": (None, [], [print], (print, lambda output_ids, logits: logits)),
    "extra_args": (None, {}, {"target": 5}),
    "timeout": (None, 1e-9, 5, 2.5, numpy.float32(0.5)),
    "structured_outputs": (None, StructuredOutputsParams(regex="a+")),
    "output_kind": ("cumulative", "delta", RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY),
}

# The same for beams, where beam_width has no default.
BEAM_OUT_OF_RANGE = [
    *each("beam_width", (0, -1), ">= 1"),
    *each("max_tokens", (0, -1), ">= 1"),
    *each("length_penalty", (NAN, INF, -INF, 10**400), "in [-10, 10]; 0 compares plain sums"),
    *each("early_stopping", ("always", "Never", "", "true"), "True, False or 'never'"),
]
BEAM_WRONG_TYPE = [
    *[row for name in ("beam_width", "max_tokens") for row in each(name, (1.0, "3", None, True, [4], NAN, INF), "an integer")],
    *each("length_penalty", ("1", None, True, False, [1.0], 1j), "a number"),
    *each("ignore_eos", (1, 0, "yes", None, NAN), "True or False"),
]
BEAM_ACCEPTED = {
    "beam_width": (1, 4, numpy.int64(3)),
    "max_tokens": (1, 10**9),
    "length_penalty": (0, -1, 1, 2.5, -0.5),
    "early_stopping": (True, False, "never"),
    "ignore_eos": (True, False),
}


def rows_of(tables):
    return [pytest.param(kind, *row, id=f"{row[0]}={row[1]!r}"[:40]) for kind, table in tables for row in table]


def make(kind, **given):
    return kind(**({"beam_width": 4} if kind is BeamSearchParams else {}) | given)


def message(error, kind, name, value):
    with pytest.raises(error) as caught:
        make(kind, **{name: value})
    assert isinstance(caught.value, NanoinferError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "value", "got", "allowed"),
    rows_of([(SamplingParams, OUT_OF_RANGE), (BeamSearchParams, BEAM_OUT_OF_RANGE)]),
)
def test_a_value_out_of_range_is_refused_by_name_value_and_range(kind, name, value, got, allowed):
    told = message(InvalidValueError, kind, name, value)
    allowed, _, hint = allowed.partition("; ")
    assert told.startswith((f"{name} must ", f"each of {name} must ", f"each id of {name} ", f"{name}["))
    assert f"{allowed}, got {shown(got)}" in told
    assert told.partition("; ")[2].startswith(hint)


@pytest.mark.parametrize(
    ("kind", "name", "value", "got", "allowed"), rows_of([(SamplingParams, WRONG_TYPE), (BeamSearchParams, BEAM_WRONG_TYPE)])
)
def test_a_value_of_the_wrong_type_is_refused_by_name_value_and_type(kind, name, value, got, allowed):
    told = message(InvalidTypeError, kind, name, value)
    assert told.startswith((f"{name} must be ", f"each of {name} must ", f"each id of {name} ", f"{name}["))
    assert f"must be {allowed}" in told
    assert told.endswith(f", got {got!r}")


def test_the_kinds_of_error_are_pythons_own_too():
    with pytest.raises(ValueError, match="top_p must be"):
        SamplingParams(top_p=2)
    with pytest.raises(TypeError, match="top_p must be"):
        SamplingParams(top_p="2")


@pytest.mark.parametrize("value", [0, 1, None, ["never"], NAN])
def test_early_stopping_that_is_neither_a_flag_nor_never_is_refused(value):
    with pytest.raises(NanoinferError, match="early_stopping must be True, False or 'never', got "):
        BeamSearchParams(beam_width=4, early_stopping=value)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        pytest.param(kind, name, value, id=f"{name}={value!r}"[:40])
        for kind, table in ((SamplingParams, ACCEPTED), (BeamSearchParams, BEAM_ACCEPTED))
        for name, values in table.items()
        for value in values
    ],
)
def test_a_value_in_range_is_accepted(kind, name, value):
    make(kind, **{name: value})


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        (SamplingParams, (OUT_OF_RANGE, WRONG_TYPE, ACCEPTED)),
        (BeamSearchParams, (BEAM_OUT_OF_RANGE, BEAM_WRONG_TYPE, BEAM_ACCEPTED)),
    ],
)
def test_the_tables_above_know_every_parameter(kind, tables):
    out_of_range, wrong_type, accepted = tables
    names = {field.name for field in fields(kind)}
    assert set(accepted) == names
    refused = {row[0] for row in out_of_range + wrong_type}
    assert refused == names


def test_min_tokens_beyond_max_tokens_is_refused_and_equality_is_not():
    with pytest.raises(InvalidValueError, match=r"min_tokens=17 and max_tokens=16"):
        SamplingParams(min_tokens=17)  # the default max_tokens counts
    SamplingParams(min_tokens=16)
    SamplingParams(min_tokens=1000, max_tokens=None)


def test_a_requests_max_tokens_wins_over_the_min_tokens_of_the_checkpoint():
    default = SamplingParams(temperature=0.0, min_tokens=20, max_tokens=None)
    assert over_default(default, max_tokens=5) == SamplingParams(temperature=0.0, min_tokens=5, max_tokens=5)
    assert over_default(default, max_tokens=None, temperature=0.5).min_tokens == 20
    assert over_default(default, max_tokens=30) == SamplingParams(temperature=0.0, min_tokens=20, max_tokens=30)
    with pytest.raises(InvalidValueError, match="min_tokens must not pass max_tokens"):
        over_default(default, max_tokens=5, min_tokens=6)


def test_a_structured_answer_may_repeat_what_the_checkpoint_would_forbid():
    default, structured = SamplingParams(no_repeat_ngram_size=1), StructuredOutputsParams(regex="(ab ){6}")
    assert over_default(default, structured_outputs=structured).no_repeat_ngram_size == 0
    assert over_default(default, structured_outputs=structured, no_repeat_ngram_size=2).no_repeat_ngram_size == 2
    assert over_default(default, structured_outputs=None).no_repeat_ngram_size == 1


def test_stop_strings_without_text_are_refused_and_no_stop_strings_are_not():
    with pytest.raises(InvalidValueError, match=r"stop=\('END',\) needs text, but detokenize=False; use stop_token_ids"):
        SamplingParams(stop="END", detokenize=False)
    SamplingParams(stop=[], detokenize=False)
    SamplingParams(stop_token_ids=[1], detokenize=False)


def test_several_answers_at_temperature_zero_are_refused_and_one_is_not():
    with pytest.raises(InvalidValueError, match="n must be 1 at temperature 0, got 2: all answers would be the same; raise"):
        SamplingParams(n=2, temperature=0.0)
    SamplingParams(n=1, temperature=0.0)
    SamplingParams(n=2, temperature=1e-300)


@pytest.mark.parametrize(
    ("kind", "name", "value", "got", "allowed"),
    rows_of([(SamplingParams, OUT_OF_RANGE + WRONG_TYPE), (BeamSearchParams, BEAM_OUT_OF_RANGE + BEAM_WRONG_TYPE)]),
)
def test_an_assignment_is_refused_as_the_constructor_refuses_the_argument(kind, name, value, got, allowed):
    expected = message(NanoinferError, kind, name, value)
    params = make(kind)
    with pytest.raises(NanoinferError) as caught:
        setattr(params, name, value)
    assert str(caught.value) == expected
    assert params == make(kind)  # nothing was changed


def test_an_assignment_gives_what_the_constructor_gives():
    params = SamplingParams(seed=3)
    params.max_tokens, params.stop, params.top_k, params.logprobs = 20, "end", -1, numpy.int64(2)
    assert params == SamplingParams(seed=3, max_tokens=20, stop="end", top_k=-1, logprobs=2)
    assert params.stop == ("end",)
    params.structured_outputs = None  # changes nothing, as in the constructor
    with pytest.raises(InvalidTypeError, match=r"SamplingParams has no argument 'max_token'; did you mean max_tokens\?"):
        params.max_token = 5
    with pytest.raises(InvalidValueError, match="min_tokens=21 and max_tokens=20"):
        params.min_tokens = 21
    beams = BeamSearchParams(beam_width=2)
    beams.beam_width = 3
    assert beams == BeamSearchParams(beam_width=3)


def test_a_clone_is_equal_and_independent():
    params = SamplingParams(temperature=0.5, logit_bias={5: 1}, logits_processors=[lambda output_ids, logits: logits])
    clone = params.clone()
    assert clone == params
    clone.temperature = 0.7
    clone.logit_bias[5] = 2.0
    assert (params.temperature, params.logit_bias) == (0.5, {5: 1.0})


@pytest.mark.parametrize(
    "given",
    [
        {"flat_logprobs": False, "structured_outputs": None, "guided_decoding": None, "output_kind": "cumulative"},
        {"spaces_between_special_tokens": True, "extra_args": None, "truncate_prompt_tokens": None},
        {"extra_args": {}, "skip_reading_prefix_cache": False},
        *({name: value} for name, accepted in NEUTRAL.items() if not isinstance(accepted, str) for value in accepted[0]),
        {"logprobs": False, "prompt_logprobs": False},
    ],
)
def test_vllms_parameters_are_accepted_with_the_values_that_change_nothing(given):
    assert SamplingParams(**given) == SamplingParams()
    assert BeamSearchParams(beam_width=2, temperature=0.0, include_stop_str_in_output=False) == BeamSearchParams(beam_width=2)


@pytest.mark.parametrize(
    ("name", "value", "acts_as"),
    [
        ("flat_logprobs", True, False),
        ("spaces_between_special_tokens", False, True),
        ("skip_reading_prefix_cache", numpy.array([1, 2]), None),
        ("skip_clone", 2, False),
    ],
)
def test_any_other_value_of_these_is_refused_by_name(name, value, acts_as):
    with pytest.raises(UnsupportedError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name}={value!r} is not supported; leave it out (it acts as {acts_as!r})"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprob_token_ids", [1]), ("prompt_logprob_start", 3), ("trace_decode_token_ids", [1]), ("stream_interval", 2),
        ("routed_experts_prompt_start", 3),
    ],
)  # fmt: skip
def test_any_other_value_of_vllms_newer_parameters_is_refused_with_a_hint(name, value):
    with pytest.raises(UnsupportedError, match=re.escape(f"{name}={value!r} is not supported; {NEUTRAL[name][1]}")):
        SamplingParams(**{name: value})


def test_true_log_probabilities_are_those_of_one_token_as_in_vllm():
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(logprobs=1, prompt_logprobs=1)
    assert type(SamplingParams(logprobs=True).logprobs) is int


def test_given_ids_take_the_place_of_the_most_likely_ones():
    assert SamplingParams(logprob_token_ids=[3, 5]).logprobs == 0
    assert SamplingParams(logprob_token_ids=[3, 5], logprobs=2) == SamplingParams(logprob_token_ids=[3, 5])
    with pytest.raises(InvalidValueError, match="logprobs must be 2, the number of logprob_token_ids, got 3; leave one"):
        SamplingParams(logprob_token_ids=[3, 5], logprobs=3)


def test_a_type_checker_and_an_editor_can_read_the_types():
    assert get_type_hints(SamplingParams)["max_tokens"] == int | None
    assert get_type_hints(BeamSearchParams)["beam_width"] is int


def test_a_list_given_can_be_changed_later_without_changing_the_params():
    stop, stop_token_ids, allowed, bias, word, processors = ["a"], [1], [2], {3: 4.0}, [5, 6], [print]
    params = SamplingParams(
        stop=stop,
        stop_token_ids=stop_token_ids,
        allowed_token_ids=allowed,
        logit_bias=bias,
        bad_words=[word],
        logits_processors=processors,
    )
    for given in (stop, stop_token_ids, allowed, bias, word, processors):
        given.clear()
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a",), (1,), (2,))
    assert (params.logit_bias, params.bad_words, params.logits_processors) == ({3: 4.0}, ((5, 6),), (print,))


def test_every_way_to_say_the_same_gives_equal_params():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams(top_k=-1).top_k == SamplingParams(top_k=0).top_k == 0
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=None).stop_token_ids == SamplingParams(stop_token_ids=[]).stop_token_ids == ()
    assert SamplingParams(logit_bias={}).logit_bias is SamplingParams().logit_bias is None
    assert SamplingParams(bad_words=["a", [1, 2]]).bad_words == SamplingParams(bad_words=("a", (1, 2))).bad_words
    assert SamplingParams(bad_words=None).bad_words == SamplingParams(bad_words=[]).bad_words == ()
    assert SamplingParams(logits_processors=None).logits_processors == SamplingParams(logits_processors=[]).logits_processors
    assert SamplingParams(allowed_token_ids=[1, 2]) == SamplingParams(allowed_token_ids=(1, 2)) != SamplingParams()
    assert SamplingParams(stop="ab", seed=-1, top_k=-1) == SamplingParams(stop=("ab",))
    assert SamplingParams(seed=1) != SamplingParams(seed=2)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_too_large_for_a_float_is_refused_as_out_of_range(name):
    with pytest.raises(InvalidValueError, match=f"{name} must be"):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, field.name, id=field.name) for kind in (SamplingParams, BeamSearchParams) for field in fields(kind)],
)
def test_an_array_is_refused_by_name(kind, name):
    with pytest.raises(NanoinferError, match=f"{name} must be .*, got array"):
        make(kind, **{name: numpy.array([1, 2])})


def test_numpys_numbers_become_plain_ones():
    params = SamplingParams(
        seed=numpy.uint64(2**63),
        temperature=numpy.float32(0.5),
        top_k=numpy.int64(3),
        max_tokens=numpy.int32(4),
        n=numpy.int64(2),
        logprobs=numpy.int64(3),
        presence_penalty=numpy.float64(0.5),
        stop_token_ids=[numpy.int64(3)],
        allowed_token_ids=[numpy.int64(3)],
        logit_bias={numpy.int64(3): numpy.float32(0.5)},
        bad_words=[[numpy.int64(3)]],
    )
    [(biased, bias)] = params.logit_bias.items()
    numbers = [params.seed, params.top_k, params.max_tokens, params.n, params.logprobs, biased]
    numbers += [params.stop_token_ids[0], params.allowed_token_ids[0], params.bad_words[0][0]]
    assert {type(number) for number in numbers} == {int}
    assert {type(number) for number in (params.temperature, params.presence_penalty, bias)} == {float}


def test_an_unknown_argument_is_named_with_the_one_that_was_meant():
    with pytest.raises(InvalidTypeError, match="SamplingParams has no argument 'temprature'; did you mean temperature"):
        SamplingParams(temprature=0.5)
    with pytest.raises(InvalidTypeError, match=r"no argument 'repitition_penalty'; did you mean repetition_penalty\?"):
        SamplingParams(repitition_penalty=1.1)
    with pytest.raises(InvalidTypeError, match="no argument 'xyz'; known are temperature, top_k"):
        SamplingParams(xyz=2)
    with pytest.raises(InvalidTypeError, match=r"keyword arguments only, got \(0.5,\); write temperature=0.5"):
        SamplingParams(0.5)


def test_an_unknown_argument_of_beams_is_named_with_the_one_that_was_meant():
    with pytest.raises(InvalidTypeError, match=r"BeamSearchParams has no argument 'beam_widht'; did you mean beam_width\?"):
        BeamSearchParams(beam_widht=4)
    with pytest.raises(InvalidTypeError, match="no argument 'top_k'; known are beam_width, max_tokens"):
        BeamSearchParams(beam_width=4, top_k=0)


def test_beams_without_a_width_are_refused_by_name():
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5, "stop": ["a"], "seed": 3},
        {"n": 2, "logprobs": 0, "prompt_logprobs": -1, "logit_bias": {5: 1}, "allowed_token_ids": [5], "bad_words": ["a", [1]]},
        {"repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": -1, "logits_processors": [print]},
    ],
)
def test_params_can_be_copied_and_pickled(given):
    params = SamplingParams(**given)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params
    assert params != SamplingParams()
