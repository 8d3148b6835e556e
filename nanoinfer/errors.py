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
