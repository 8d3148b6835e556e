"""Every parameter is checked when it is given or assigned: what is out of range or of a wrong type is refused by name."""

import copy
import math
import pickle
import sys
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
TINY, HUGE = 5e-324, sys.float_info.max
LARGEST = 2**63 - 1
REPORTED = ">= 0, -1 for all, or None to turn it off"

# parameter: (lowest, highest, what messages say is allowed; the hint). A float takes floats, an int integers only.
NUMBERS = {
    SamplingParams: {
        "temperature": (0.0, HUGE, "finite and >= 0; 0 is greedy"),
        "top_p": (TINY, 1.0, "in (0, 1]; 1.0 to turn it off"),
        "min_p": (0.0, 1.0, "in [0, 1]; use 0 to turn it off"),
        "top_k": (-1, LARGEST, ">= 1, or 0 or -1 to turn it off"),
        "seed": (-1, 2**64 - 1, "in 0 .. 2**64 - 1, or None or -1 to draw one"),
        "max_tokens": (1, LARGEST, ">= 1, or None for the model's length"),
        "min_tokens": (0, LARGEST, ">= 0"),
        "thinking_token_budget": (-1, LARGEST, ">= 0, or None or -1 for no limit"),
        "timeout": (TINY, HUGE, "> 0 seconds; leave it out for no limit"),
        "n": (1, 16384, "in 1 .. 16384"),
        "repetition_penalty": (TINY, HUGE, "finite and > 0; use 1.0 to turn it off"),
        "presence_penalty": (-2.0, 2.0, "in [-2, 2]; use 0 to turn it off"),
        "frequency_penalty": (-2.0, 2.0, "in [-2, 2]; use 0 to turn it off"),
        "no_repeat_ngram_size": (0, LARGEST, ">= 1, or 0 to turn it off"),
        "logprobs": (-1, LARGEST, REPORTED),
        "prompt_logprobs": (-1, LARGEST, REPORTED),
    },
    BeamSearchParams: {
        "beam_width": (1, LARGEST, ">= 1"),
        "max_tokens": (1, LARGEST, ">= 1"),
        "length_penalty": (-10.0, 10.0, "in [-10, 10]; 0 compares plain sums"),
    },
}
MAY_BE_NONE = ("seed", "thinking_token_budget", "timeout", "logprobs", "prompt_logprobs")  # and max_tokens of SamplingParams
MAY_BE_FLAGS = ("logprobs", "prompt_logprobs")
FLAGS = {
    SamplingParams: ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "return_sampling_mask"),
    BeamSearchParams: ("ignore_eos",),
}
DETECTION = {"max_pattern_size": 3, "min_count": 2}
NO_LISTS = (5, "ab", b"ab", {1, 2}, True, NAN, INF, numpy.array([1, 2]))
FUNCTIONS = "a list of functions (prompt_ids, output_ids, logits) -> logits or (output_ids, logits) -> logits"


def halved(prompt_ids, output_ids, logits):
    return logits / 2


def each(name, values, allowed):
    """Rows of the table below: the parameter, a value and the message, in which {} is the value."""
    return [(name, value, f"{name} must {allowed}, got {{}}") for value in values]


def ids_of(name, *, inside=lambda ids: ids):
    """What no list of token ids may hold. inside: puts the list where the parameter takes it."""
    no_ids = [(f"each of {name} must be an integer, got {wrong!r}", [1, wrong]) for wrong in (1.0, "a", True, None, NAN)]
    no_ids.append((f"each of {name} must be >= 0, got -7", [3, -7]))
    return [(name, inside(ids), message) for message, ids in no_ids]


OTHERS = [
    *each("stop", (5, b"end", [1], {"a"}, ["a", None], True, NAN), "be a string or a list of strings"),
    *[("stop", one, "stop must not hold an empty string, got {}; leave stop out to turn it off") for one in ("", ["a", ""])],
    *[row for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids") for row in ids_of(name)],
    *[
        row
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
        for row in each(name, NO_LISTS, "be a list of token ids")
    ],
    ("allowed_token_ids", [], "allowed_token_ids must hold at least one id, got []; leave it out to allow all"),
    *each("logit_bias", ([1], [(1, 2.0)], "x", 5, {1, 2}, True, NAN), "be a dict of token ids and numbers"),
    *[("logit_bias", {one: 1.0}, f"each id of logit_bias must be an integer, got {one!r}") for one in ("5", 1.0, True, None)],
    ("logit_bias", {1: 100, -1: 1}, "each id of logit_bias must be >= 0, got -1"),
    *[("logit_bias", {5: one}, f"logit_bias[5] must be a number, got {one!r}") for one in ("1", None, True, [1.0], 1j)],
    *[
        ("logit_bias", {5: one}, f"logit_bias[5] must be in [-100, 100], got {shown(one)}; allowed_token_ids and bad_words can")
        for one in (math.nextafter(-100, -INF), 101, 10**400, NAN, INF)
    ],
    *each("bad_words", ("a", b"a", 5, {"a"}, True, NAN), "be a list of strings and lists of token ids"),
    *ids_of("bad_words", inside=lambda ids: ["a", ids]),
    *[
        ("bad_words", ["a", one], f"each of bad_words must be a string or a list of token ids, got {one!r}")
        for one in (5, 5.0, b"a", True, {1}, None)
    ],
    *[
        ("bad_words", ["a", one], f"bad_words must not hold an empty word, got {one!r}; leave it out")
        for one in ("", "\n\t", ())
    ],
    *each("logits_processors", (print, "ab", 5, [5], [print, None], {print}, True, NAN), f"be {FUNCTIONS}"),
    *each("repetition_detection", (5, "3", [3], True, NAN), "be RepetitionDetectionParams or a dict"),
    *each("structured_outputs", ("json", {"json": {}}, 5, [], True, NAN), "be StructuredOutputsParams"),
    *each("extra_args", ([1], "x", 5, True, NAN), "be a dict"),
    *each("output_kind", ("all", "", None, 1, [-1]), "be one of cumulative, delta, final_only"),
]
OF_BEAMS = [*each("early_stopping", (0, 1, None, ["never"], NAN, "always", "Never", ""), "be True, False or 'never'")]

# parameter, values that mean the same, what is kept of each
ACCEPTED = [
    ("seed", (None, -1), None),
    ("thinking_token_budget", (None, -1), None),
    ("top_k", (-1, 0), 0),
    ("max_tokens", (None,), None),
    ("stop", (None, []), ()),
    ("stop", ("ab", ["ab"], ("ab",)), ("ab",)),
    ("stop_token_ids", (None, []), ()),
    ("stop_token_ids", ([0, 1], (0, 1), range(2), [numpy.int64(0), 1]), (0, 1)),
    ("allowed_token_ids", ([0, 1], (0, 1), range(2)), (0, 1)),
    ("allowed_token_ids", (None,), None),
    ("logprob_token_ids", (None, []), ()),
    ("logit_bias", (None, {}), None),
    ("logit_bias", ({1: 100, 5: -100}, {numpy.int64(1): numpy.float32(100), 5: -100.0}), {1: 100.0, 5: -100.0}),
    ("bad_words", (None, []), ()),
    ("bad_words", (["a", [1, 2]], ("a", (1, 2))), ("a", (1, 2))),
    ("logprobs", (None, False), None),
    ("logprobs", (1, True, numpy.int64(1)), 1),
    ("prompt_logprobs", (1, True), 1),
    ("logits_processors", (None, [], ()), ()),
    ("logits_processors", ([halved], (halved,)), (halved,)),
    ("extra_args", (None, {}), None),
    ("structured_outputs", (None,), None),
    ("repetition_detection", (None,), None),
    ("repetition_detection", (DETECTION, RepetitionDetectionParams(**DETECTION)), RepetitionDetectionParams(**DETECTION)),
    ("output_kind", ("delta", RequestOutputKind.DELTA), RequestOutputKind.DELTA),
    ("temperature", (numpy.float32(0.5), 0.5), 0.5),
]


def make(kind, **given):
    return kind(**({"beam_width": 4} if kind is BeamSearchParams else {}) | given)


def refuse(error, kind, name, value):
    """Return the message of the constructor. An assignment has the same, and changes nothing."""
    with pytest.raises(error) as caught:
        make(kind, **{name: value})
    params = make(kind)
    with pytest.raises(error) as assigned:
        setattr(params, name, value)
    assert str(assigned.value) == str(caught.value)
    assert params == make(kind)
    assert isinstance(caught.value, NanoinferError)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in NUMBERS.items() for name in table])
def test_a_number_is_accepted_up_to_its_limits_and_refused_beyond_with_its_name_the_value_and_what_is_allowed(kind, name):
    lowest, highest, allowed = NUMBERS[kind][name]
    is_integer, or_none = isinstance(lowest, int), name in MAY_BE_NONE or (kind, name) == (SamplingParams, "max_tokens")
    free = {} if kind is BeamSearchParams else {"max_tokens": None}
    for value in (lowest, highest, *[None] * or_none):
        make(kind, **free | {name: value})
    beyond = [lowest - 1, highest + 1] if is_integer else [math.nextafter(lowest, -INF), math.nextafter(highest, INF)]
    for value in beyond + ([] if is_integer else [NAN, INF, -INF, 10**400]):
        message = refuse(InvalidValueError, kind, name, value)
        range_, _, hint = allowed.partition("; ")
        range_ = "below 2**63" if value == 2**63 else range_
        assert message.startswith(f"{name} must be {range_}, got {shown(value)}")
        assert hint in message
    kind_of = "an integer" if is_integer else "a number"
    wrong = ["3", [1.0], {}, 1j, numpy.array([1, 2]), *[True, False] * (name not in MAY_BE_FLAGS), *[None] * (not or_none)]
    for value in wrong + ([1.0, 2.5, NAN, INF] if is_integer else []):
        none = " or None" * (or_none and is_integer)
        assert refuse(InvalidTypeError, kind, name, value) == f"{name} must be {kind_of}{none}, got {shown(value)}"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FLAGS.items() for name in names])
def test_a_flag_is_true_or_false_and_no_number(kind, name):
    for value in (True, False):
        assert getattr(make(kind, **{name: value}), name) is value
    for value in (1, 0, "yes", None, [True], NAN, numpy.array([1, 2])):
        assert refuse(InvalidTypeError, kind, name, value) == f"{name} must be True or False, got {shown(value)}"


@pytest.mark.parametrize("name", dict.fromkeys(row[0] for row in OTHERS + OF_BEAMS))
def test_another_value_is_refused_with_its_name_the_value_and_what_is_allowed(name):
    for kind, table in ((SamplingParams, OTHERS), (BeamSearchParams, OF_BEAMS)):
        for _, value, message in [row for row in table if row[0] == name]:
            assert refuse(NanoinferError, kind, name, value).startswith(message.replace("{}", shown(value)))


@pytest.mark.parametrize(("name", "values", "kept"), ACCEPTED)
def test_every_way_to_say_the_same_gives_equal_params_with_plain_values(name, values, kept):
    made = [SamplingParams(**{name: value}) for value in values]
    assert all(params == made[0] for params in made)
    assert getattr(made[0], name) == kept
    assert {repr(getattr(params, name)) for params in made} == {repr(kept)}  # numpy's numbers become plain ones
    assert pickle.loads(pickle.dumps(made[0])) == copy.deepcopy(made[0]) == replace(made[0]) == made[0]


def test_the_tables_above_know_every_parameter():
    for kind, others in ((SamplingParams, OTHERS), (BeamSearchParams, OF_BEAMS)):
        assert {*NUMBERS[kind], *FLAGS[kind], *(row[0] for row in others)} == {field.name for field in fields(kind)}


def test_the_kinds_of_error_are_pythons_own_too():
    with pytest.raises(ValueError, match=r"top_p must be in .*, got 0; use temperature=0 for greedy, 1\.0 to turn it off"):
        SamplingParams(top_p=0)
    with pytest.raises(TypeError, match="top_p must be"):
        SamplingParams(top_p="2")


def test_min_tokens_may_equal_max_tokens_and_a_requests_max_tokens_wins_over_the_min_tokens_of_the_checkpoint():
    SamplingParams(min_tokens=16)
    SamplingParams(min_tokens=1000, max_tokens=None)
    default = SamplingParams(temperature=0.0, min_tokens=20, max_tokens=None)
    assert over_default(default, max_tokens=5) == SamplingParams(temperature=0.0, min_tokens=5, max_tokens=5)
    assert over_default(default, max_tokens=None, temperature=0.5).min_tokens == 20
    assert over_default(default, max_tokens=30) == SamplingParams(temperature=0.0, min_tokens=20, max_tokens=30)
    with pytest.raises(InvalidValueError, match="min_tokens must not pass max_tokens"):
        over_default(default, max_tokens=5, min_tokens=6)


def test_a_structured_answer_may_repeat_what_the_checkpoint_would_forbid_and_ends_when_it_is_complete():
    default, structured = SamplingParams(no_repeat_ngram_size=1), StructuredOutputsParams(regex="(ab ){6}")
    assert over_default(default, structured_outputs=structured).no_repeat_ngram_size == 0
    assert over_default(default, structured_outputs=structured, no_repeat_ngram_size=2).no_repeat_ngram_size == 2
    assert over_default(default, structured_outputs=None).no_repeat_ngram_size == 1
    for given, message in (
        ({"ignore_eos": True}, "ignore_eos cannot be used with structured_outputs: the answer ends when it is complete"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids cannot be used with structured_outputs, which decides what is allowed"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            SamplingParams(structured_outputs=structured, **given)


def test_values_that_contradict_each_other_are_refused():
    with pytest.raises(InvalidValueError, match="n must be 1 at temperature 0, got 2: all answers would be the same; raise"):
        SamplingParams(n=2, temperature=0.0)
    with pytest.raises(InvalidValueError, match="min_tokens must not pass max_tokens, got min_tokens=17 and max_tokens=16"):
        SamplingParams(min_tokens=17)
    with pytest.raises(InvalidValueError, match="min_tokens=17 and max_tokens=16"):
        SamplingParams().min_tokens = 17
    with pytest.raises(InvalidValueError, match=r"stop=\('END',\) needs text, but detokenize=False; use stop_token_ids"):
        SamplingParams(stop="END", detokenize=False)
    SamplingParams(stop=[], stop_token_ids=[1], detokenize=False)
    SamplingParams(n=1, temperature=0.0)
    SamplingParams(n=2, temperature=1e-300)


def test_an_assignment_gives_what_the_constructor_gives():
    params = SamplingParams(seed=3)
    params.max_tokens, params.stop, params.top_k, params.logprobs = 20, "end", -1, numpy.int64(2)
    assert params == SamplingParams(seed=3, max_tokens=20, stop="end", top_k=-1, logprobs=2)
    params.structured_outputs = None  # changes nothing, as in the constructor
    with pytest.raises(InvalidTypeError, match=r"SamplingParams has no argument 'max_token'; did you mean max_tokens\?"):
        params.max_token = 5
    beams = BeamSearchParams(beam_width=2)
    beams.beam_width = 3
    assert beams == BeamSearchParams(beam_width=3)


def test_a_clone_and_what_was_given_are_independent():
    given = {
        "stop": ["a"],
        "stop_token_ids": [1],
        "allowed_token_ids": [2],
        "logit_bias": {3: 4.0},
        "logits_processors": [halved],
    }
    params = SamplingParams(**given, bad_words=[word := [5, 6]])
    expected = SamplingParams(**copy.deepcopy(given), bad_words=[[5, 6]])
    clone = params.clone()
    for value in (*given.values(), word):
        value.clear()
    assert params == clone == expected
    clone.temperature = 0.7
    clone.logit_bias[3] = 2.0
    assert (params.temperature, params.logit_bias) == (1.0, {3: 4.0})


def test_vllms_parameters_are_accepted_with_the_values_that_change_nothing_and_else_refused_with_a_hint():
    for given in (
        {"flat_logprobs": False, "structured_outputs": None, "guided_decoding": None, "output_kind": "cumulative"},
        {"spaces_between_special_tokens": True, "extra_args": {}, "truncate_prompt_tokens": None},
        *({name: value} for name, accepted in NEUTRAL.items() if not isinstance(accepted, str) for value in accepted[0]),
    ):
        assert SamplingParams(**given) == SamplingParams()
    assert BeamSearchParams(beam_width=2, temperature=0.0, include_stop_str_in_output=False) == BeamSearchParams(beam_width=2)
    for name, value, hint in (
        ("flat_logprobs", True, "leave it out (it acts as False)"),
        ("spaces_between_special_tokens", False, "leave it out (it acts as True)"),
        ("skip_reading_prefix_cache", numpy.array([1, 2]), "leave it out (it acts as None)"),
        ("prompt_logprob_token_ids", [1], NEUTRAL["prompt_logprob_token_ids"][1]),
        ("stream_interval", 2, NEUTRAL["stream_interval"][1]),
        ("best_of", 2, "use n, and keep the answers with the highest cumulative_logprob"),
        ("num_beams", 4, "use LLM.beam_search() with BeamSearchParams"),
        ("max_new_tokens", 5, "use max_tokens"),
        ("guided_json", {}, "use structured_outputs=StructuredOutputsParams(json=...), in HTTP {'json': ...}"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value) == f"{name}={value!r} is not supported; {hint}"


def test_given_ids_take_the_place_of_the_most_likely_ones():
    assert SamplingParams(logprob_token_ids=[3, 5]).logprobs == 0
    assert SamplingParams(logprob_token_ids=[3, 5], logprobs=2) == SamplingParams(logprob_token_ids=[3, 5])
    with pytest.raises(InvalidValueError, match="logprobs must be 2, the number of logprob_token_ids, got 3; leave one"):
        SamplingParams(logprob_token_ids=[3, 5], logprobs=3)


def test_a_type_checker_and_an_editor_can_read_the_types():
    assert get_type_hints(SamplingParams)["max_tokens"] == int | None
    assert get_type_hints(BeamSearchParams)["beam_width"] is int


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (SamplingParams, {"temprature": 0.5}, "SamplingParams has no argument 'temprature'; did you mean temperature"),
        (SamplingParams, {"xyz": 2}, "no argument 'xyz'; known are temperature, top_k"),
        (BeamSearchParams, {"beam_widht": 4}, r"BeamSearchParams has no argument 'beam_widht'; did you mean beam_width\?"),
        (BeamSearchParams, {"beam_width": 4, "top_k": 0}, "no argument 'top_k'; known are beam_width, max_tokens"),
        (BeamSearchParams, {}, "BeamSearchParams: missing a required argument: 'beam_width'"),
    ],
)
def test_an_argument_that_is_unknown_or_missing_is_named_with_the_one_that_was_meant(kind, given, message):
    with pytest.raises(InvalidTypeError, match=message):
        kind(**given)
    with pytest.raises(InvalidTypeError, match=r"keyword arguments only, got \(0.5,\); write temperature=0.5"):
        SamplingParams(0.5)
