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
