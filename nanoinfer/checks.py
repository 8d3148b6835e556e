"""Is a user's value of the right type, and in its range? One sentence for each way it may not be.

In: a parameter's name and value. Out: nothing, or an error that says what, got, allowed, way out.
"""

import math
from numbers import Integral, Real
from typing import Any

from nanoinfer.errors import InvalidTypeError, InvalidValueError


def out_of_range(name: str, value: Any, allowed: str) -> InvalidValueError:
    """The error for a value that is not `allowed`, which may carry its way out behind a semicolon."""
    allowed, _, way_out = allowed.partition("; ")
    return InvalidValueError(f"{name} must be {allowed}, got {value!r}" + (f"; {way_out}" if way_out else ""))


def check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    """A finite number in low .. high."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be a number, got {value!r}")
    try:
        in_range = low <= float(value) <= high and math.isfinite(value)  # NaN fails every comparison
    except OverflowError:  # an int beyond every float
        in_range = False
    if not in_range:
        raise out_of_range(name, value, allowed)


def check_integer(name: str, value: Any, low: int, high: int | None, allowed: str, *, or_none: bool = False) -> None:
    """An integer in low .. high, where None is no bound; or None itself."""
    if value is None and or_none:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an integer{' or None' if or_none else ''}, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        raise out_of_range(name, value, allowed)


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {value!r}")
