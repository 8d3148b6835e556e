"""Errors that nanoinfer raises on purpose, and the argument checks that raise them.

Each message says what is wrong, what was given, what is allowed, and gives a hint.

A prompt that is too long raises no error if other prompts of the call are answered. Its result has finish_reason "error".
"""

import difflib
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real

TRY_LATER = "try again later"  # the end of an error that is neither the request's nor the server's fault


class NanoinferError(Exception):
    """The base class. `except NanoinferError` catches everything that this package raises on purpose."""


class InvalidValueError(NanoinferError, ValueError):
    """A value out of its range, or two values that contradict each other."""


class InvalidPromptError(InvalidValueError):
    """A prompt that cannot be used. outputs: the RequestOutputs of an LLM.generate whose prompts are all too long."""

    outputs: Sequence[object] = ()


class UnsupportedError(InvalidValueError):
    """A known feature that nanoinfer does not support."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """A method or an attribute of vLLM's that nanoinfer does not have. hasattr() is False."""


class CheckpointError(InvalidValueError):
    """A model folder that cannot be used."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A model folder that does not exist."""


class WeightsError(CheckpointError):
    """Missing, unexpected, misshaped or corrupted tensors."""


class InvalidTypeError(NanoinferError, TypeError):
    """A value of the wrong type, or an argument that does not exist."""


class QueueFullError(NanoinferError):
    """Too many requests, or too many new grammars, already wait in AsyncLLM or the server."""


class HelperProcessError(NanoinferError):
    """A helper process, which renders chats or tries new grammars, does not start, or is killed repeatedly."""


class EnginePausedError(NanoinferError):
    """The engine accepts no requests until resume() or wake_up()."""


class EngineDeadError(NanoinferError):
    """The engine accepts no requests: its steps have failed, one of its ranks has ended, or it was shut down."""


class OutOfMemoryError(NanoinferError, MemoryError):
    """A model that does not fit into the memory."""


class OutOfThreadsError(NanoinferError, RuntimeError):
    """The system starts no more threads for this process."""


MORE_THREADS = "raise the limit of processes (a container's pids limit, ulimit -u), or lower OMP_NUM_THREADS"


@contextmanager
def starting_threads() -> Iterator[None]:
    """Raise OutOfThreadsError where Python cannot start a thread."""
    try:
        yield
    except RuntimeError as error:
        raise OutOfThreadsError(f"the system starts no more threads; {MORE_THREADS}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, perhaps another library's, says that memory cannot be allocated."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("allocate memory", "out of memory"))


def is_one_of(value: object, allowed: Sequence[object]) -> bool:
    """Whether a value equals an allowed value. False for an array."""
    try:
        return value in allowed
    except Exception:  # comparing an array gives an array
        return False


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the known name that was probably meant, or all known names."""
    close = difflib.get_close_matches(name, known, n=1) or [other for other in known if name[2:] and other.startswith(name)]
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error for a message."""
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__


def shown(value: object) -> str:
    """Return a value's repr for a message: on one line, shortened. Values without a repr are supported, such as huge ints."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 200 else f"{text[:150]} ... {text[-40:]}"


def out_of_range(name: str, value: object, allowed: str) -> InvalidValueError:
    """Return the error for a value that is not `allowed`, which may contain a hint after a semicolon."""
    allowed, _, hint = allowed.partition("; ")
    return InvalidValueError(f"{name} must be {allowed}, got {shown(value)}" + (f"; {hint}" if hint else ""))


def check_number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    """Check that a value is a finite number in low .. high. Raises: InvalidTypeError, InvalidValueError."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be a number, got {shown(value)}")
    try:
        in_range = low <= float(value) <= high and math.isfinite(value)  # NaN fails every comparison
    except OverflowError:  # an int beyond the range of floats
        in_range = False
    if not in_range:
        raise out_of_range(name, value, allowed)


def check_integer(name: str, value: object, low: int, high: int | None, allowed: str, *, or_none: bool = False) -> None:
    """Check that a value is an integer in low .. high. high: None: 2**63 - 1. or_none: whether None is accepted."""
    if value is None and or_none:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be an integer{' or None' if or_none else ''}, got {shown(value)}")
    if high is None and int(value) >= 2**63:
        raise out_of_range(name, value, "below 2**63")
    if int(value) < low or (high is not None and int(value) > high):
        raise out_of_range(name, value, allowed)


def check_flag(name: str, value: object) -> None:
    """Check that a value is True or False. Raises: InvalidTypeError."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, got {shown(value)}")


def takes(function: object, *arguments: object) -> bool:
    """Whether a function can be called with these arguments. False for what cannot be called."""
    try:
        inspect.signature(function).bind(*arguments)  # type: ignore[arg-type]
    except ValueError:  # some functions in C have no signature
        return callable(function)
    except TypeError:
        return False
    return True


def first_ten(items: list[str], separator: str = ", ") -> str:
    """Join the first ten of many items, and say how many more there are. An item may be of any characters and length."""
    named = [item if item.isprintable() and len(item) <= 300 else shown(item) for item in items[:10]]
    return separator.join(named + ([f"and {len(items) - 10} more"] if len(items) > 10 else []))
