"""Every error nanoinfer raises on purpose. Each message says what is wrong, what was given, what is allowed, the way out.

    NanoinferError
    ├── InvalidValueError (ValueError)        a value out of its range, or two that contradict each other
    │   ├── InvalidPromptError                a prompt that cannot be used; names its index
    │   ├── UnsupportedError                  known to the field, not done here; says what is
    │   └── CheckpointError                   a model folder that cannot be used
    │       ├── CheckpointNotFoundError (FileNotFoundError)
    │       └── WeightsError                  missing, unexpected, misshaped or damaged tensors
    └── InvalidTypeError (TypeError)          a value of the wrong type

A prompt that is merely too long for the engine is no exception: it ends as a result with finish_reason "error", so that the
other prompts of the call are answered.
"""

import difflib
import math
from numbers import Integral, Real
from typing import Any


class NanoinferError(Exception):
    """The root: `except NanoinferError` catches everything this package raises on purpose."""


class InvalidValueError(NanoinferError, ValueError):
    pass


class InvalidPromptError(InvalidValueError):
    pass


class UnsupportedError(InvalidValueError):
    pass


class CheckpointError(InvalidValueError):
    pass


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    pass


class WeightsError(CheckpointError):
    pass


class InvalidTypeError(NanoinferError, TypeError):
    pass


def unknown_argument(owner: str, name: str, known: list[str]) -> InvalidTypeError:
    """The error for an argument that does not exist, with the one that was probably meant."""
    close = difflib.get_close_matches(name, known, n=1)
    way_out = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return InvalidTypeError(f"{owner} has no argument {name!r}; {way_out}")


def first_line(error: BaseException) -> str:
    """What somebody else's error says, for a sentence of ours."""
    return str(error).split("\n", maxsplit=1)[0] or type(error).__name__


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
