"""Errors that nanoinfer raises on purpose, and the argument checks that raise them.

Each message says what is wrong, what was given, what is allowed, and the way out.

    NanoinferError
    ├── InvalidValueError (ValueError)        a value out of its range, or two that contradict each other
    │   ├── InvalidPromptError                a prompt that cannot be used, named by its index
    │   ├── UnsupportedError                  a known feature that is not supported
    │   └── CheckpointError                   a model folder that cannot be used
    │       ├── CheckpointNotFoundError (FileNotFoundError)
    │       └── WeightsError                  missing, unexpected, misshaped or damaged tensors
    ├── InvalidTypeError (TypeError)          a value of the wrong type
    ├── QueueFullError                        too many requests wait, or too many new grammars: AsyncLLM, the server
    └── EngineDeadError                       the engine has failed, has lost a rank, or was shut down

A prompt that is only too long for the engine raises nothing. Its result has finish_reason "error", and the other prompts of the
call are answered.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class NanoinferError(Exception):
    """The base class. `except NanoinferError` catches everything that this package raises on purpose."""


class InvalidValueError(NanoinferError, ValueError):
    """A value out of its range, or two values that contradict each other."""


class InvalidPromptError(InvalidValueError):
    """A prompt that cannot be used."""


class UnsupportedError(InvalidValueError):
    """A known feature that nanoinfer does not support."""


class CheckpointError(InvalidValueError):
    """A model folder that cannot be used."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A model folder that does not exist."""


class WeightsError(CheckpointError):
    """Missing, unexpected, misshaped or damaged tensors."""


class InvalidTypeError(NanoinferError, TypeError):
    """A value of the wrong type, or an argument that does not exist."""


class QueueFullError(NanoinferError):
    """Too many requests wait already, or too many new grammars."""


class EngineDeadError(NanoinferError):
    """The engine accepts no requests: its steps have failed, one of its ranks has ended, or it was shut down."""


def check_argument_names(
    owner: str, neutral: Mapping[str, Sequence[object]] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method, so that wrong arguments are refused by name before Python's own bare TypeError.

    The signature stays the one of the decorated method, for type checkers and for `inspect.signature`.

    Args:
        owner: The name in the messages, such as "LLM()".
        neutral: Arguments of other libraries, each with the values that change nothing here. Such a value is ignored. The first
            one is named in the message when a different value is refused.

    Raises:
        InvalidTypeError: From the decorated method, for an argument that is unknown, missing or not given by name.
        UnsupportedError: From the decorated method, for a neutral argument with a different value.
    """
    neutral = neutral or {}

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]  # without self
        known = [parameter.name for parameter in parameters]
        positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if (surplus := args[1 + len(positional) :]) and len(known) > len(positional):
                after = f" after {positional[-1]}" if positional else ""
                way_out = f"write {known[len(positional)]}={shown(surplus[0])}"
                raise InvalidTypeError(f"{owner} takes keyword arguments only{after}, got {shown(surplus)}; {way_out}")
            for name in [name for name in kwargs if name not in known]:
                value = kwargs.pop(name)
                if name not in neutral:
                    raise _unknown_argument(owner, name, known)
                check_neutral(name, value, neutral[name])
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # an argument is missing, or given twice
                raise InvalidTypeError(f"{owner}: {error}") from None
            return method(*args, **kwargs)

        return checked

    return decorate


def check_neutral(name: str, value: object, neutral: Sequence[object]) -> None:
    """Refuse a value of another library's argument, unless it is one of those that change nothing here."""
    if not is_one_of(value, neutral):
        raise UnsupportedError(f"{name}={shown(value)} is not supported; leave it out (it acts as {neutral[0]!r})")


def is_one_of(value: object, allowed: Sequence[object]) -> bool:
    """Whether a value equals one of the allowed ones. An array does not."""
    try:
        return value in allowed
    except Exception:  # an array compares element by element, which is neither True nor False
        return False


def _unknown_argument(owner: str, name: str, known: list[str]) -> InvalidTypeError:
    """Return the error for an argument that does not exist."""
    return InvalidTypeError(f"{owner} has no argument {name!r}; {suggest(name, known)}")


def suggest(name: str, known: Sequence[str]) -> str:
    """Return the way out for an unknown name: the known one that was probably meant, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, for use in a message."""
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__


def shown(value: object) -> str:
    """Return a value's repr for a message: on one line, shortened. Also of a value without one, an int of 5,000 digits."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 200 else f"{text[:150]} ... {text[-40:]}"


def out_of_range(name: str, value: object, allowed: str) -> InvalidValueError:
    """Return the error for a value that is not `allowed`. A way out may follow in `allowed`, after a semicolon."""
    allowed, _, way_out = allowed.partition("; ")
    return InvalidValueError(f"{name} must be {allowed}, got {shown(value)}" + (f"; {way_out}" if way_out else ""))


def check_number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    """Refuse what is not a finite number in low .. high."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be a number, got {shown(value)}")
    try:
        in_range = low <= float(value) <= high and math.isfinite(value)  # NaN fails every comparison
    except OverflowError:  # an int beyond every float
        in_range = False
    if not in_range:
        raise out_of_range(name, value, allowed)


def check_integer(name: str, value: object, low: int, high: int | None, allowed: str, *, or_none: bool = False) -> None:
    """Refuse what is not an integer in low .. high. A `high` of None is 2**63 - 1. `or_none` accepts the value None."""
    if value is None and or_none:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an integer{' or None' if or_none else ''}, got {shown(value)}")
    if high is None and int(value) >= 2**63:
        raise out_of_range(name, value, "below 2**63")
    if int(value) < low or (high is not None and int(value) > high):
        raise out_of_range(name, value, allowed)


def check_flag(name: str, value: object) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {shown(value)}")
