"""The classes of errors, and the checks of arguments that raise them."""

import numpy
import pytest

from nanoinfer import errors
from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    NanoinferError,
    check_integer,
    first_line,
    is_one_of,
    out_of_range,
    shown,
    suggest,
)


def test_every_error_is_a_nanoinfer_error_and_the_usual_kind_of_python_as_well():
    classes = [one for one in vars(errors).values() if isinstance(one, type) and one.__module__ == errors.__name__]
    assert len(classes) > 10
    assert all(issubclass(one, NanoinferError) for one in classes)
    assert issubclass(InvalidValueError, ValueError)
    assert issubclass(InvalidTypeError, TypeError)
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)


def test_an_integer_without_an_upper_bound_is_below_two_to_the_63_and_none_only_where_it_may_be():
    for value in (1, numpy.int64(7), 2**63 - 1):
        check_integer("n", value, 1, None, ">= 1")
    for value, message in (
        (2**63, r"n must be below 2\*\*63"),
        (0, "n must be >= 1, got 0"),
        (1.0, "n must be an integer, got 1.0"),
    ):
        with pytest.raises(NanoinferError, match=message):
            check_integer("n", value, 1, None, ">= 1")
    check_integer("n", None, 1, 5, "in 1 .. 5", or_none=True)
    with pytest.raises(InvalidTypeError, match="n must be an integer or None, got 'a'"):
        check_integer("n", "a", 1, 5, "in 1 .. 5", or_none=True)


def test_a_hint_follows_what_was_given():
    assert str(out_of_range("n", 9, "in 1 .. 5; leave it out")) == "n must be in 1 .. 5, got 9; leave it out"
    assert str(out_of_range("n", 9, "in 1 .. 5")) == "n must be in 1 .. 5, got 9"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("temprature", "did you mean temperature?"),
        ("temp", "did you mean temperature?"),
        ("xyz", "known are temperature, top_k"),
        ("to", "known are temperature, top_k"),
    ],
)
def test_an_unknown_name_gets_the_one_that_was_meant_or_all(name, expected):
    assert suggest(name, ["temperature", "top_k"]) == expected


def test_a_value_is_shown_on_one_line_and_shortened():
    class Unshowable:
        def __repr__(self):
            raise RuntimeError

    assert shown("a\nb") == "'a\\nb'"
    assert "\n" not in shown(numpy.zeros((9, 9)))
    assert shown("x" * 5000) == f"'{'x' * 149} ... {'x' * 39}'"
    assert shown(Unshowable()) == "a Unshowable that cannot be shown"
    assert "cannot be shown" in shown(10**5000)


def test_an_array_is_no_allowed_value_and_no_error():
    assert is_one_of("a", ("a", "b"))
    assert not is_one_of(numpy.zeros(3), (numpy.ones(3), "b"))


def test_another_librarys_error_is_its_first_line_or_its_name():
    assert first_line(ValueError("\nfirst\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"
