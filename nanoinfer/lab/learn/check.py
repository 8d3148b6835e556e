"""Compare a learner's function with the engine's, smallest cases first.

In: a Task and a function. Out: a Failure in plain words, or None.
"""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor

from nanoinfer.lab.learn.workbook import Function, Version

SECONDS = 20  # for all cases of a task together, after which the running case gets a TimeoutError
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """An input in words, and a function that observes what a version of the task's function does with it.

    Attributes:
        given: the input, in words.
        observe: makes the input, calls the version with it, and returns the visible effects.
        exact: whether floating-point numbers must have the same bits.
    """

    given: str
    observe: Callable[[Version], object]
    exact: bool = True


@dataclass(frozen=True)
class Task:
    """A function of the engine for the learner to write. `cases` tests it, smallest first."""

    name: str
    function: Function
    lesson: str  # the notebook that explains the function
    about: str
    hints: tuple[str, ...]
    cases: Callable[[], Iterable[Case]]

    @property
    def text(self) -> str:
        """The text of the learner's file."""
        about = f'"""{self.name}: {self.about}\n\nIn the engine: {self.function.module}, {self.function.qualname}. '
        return f'{about}Explained in notebook {self.lesson}.\n"""\n\n{self.function.imports}\n\n\n{self.function.header}'


@dataclass(frozen=True)
class Failure:
    """The reason why a version was refused."""

    given: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"given     {self.given}\nexpected  {self.expected}\ngot       {self.got}"


def calling(*arguments: object) -> Callable[[Version], object]:
    """Return a function that calls a version with copies of these arguments, for Case.observe."""
    return lambda version: version(*(value.clone() if isinstance(value, Tensor) else value for value in arguments))


def check(task: Task, version: Version) -> Failure | None:
    """Return the first case in which the version differs from the engine's."""
    for case in task.cases():
        expected = case.observe(task.function.original)
        try:
            got = case.observe(version)
        except Exception as error:
            return Failure(case.given, shown(expected), describe_error(error, version))
        if not same(expected, got, exact=case.exact):
            if isinstance(expected, dict) and isinstance(got, dict):  # the first part that differs is enough
                name = next((n for n in expected if not same(expected[n], got.get(n), exact=case.exact)), None)
                if name is not None:
                    expected, got = {name: expected[name]}, {name: got.get(name)}
            return Failure(case.given, shown(expected), shown(got))
    return None


def describe_error(error: BaseException, version: Version | None = None) -> str:
    """Describe an error in one line, with the learner's line at which it happened."""
    if isinstance(error, NotImplementedError):
        return "nothing: the function is not written yet"
    if isinstance(error, SyntaxError):
        return f"a SyntaxError in line {error.lineno}: {error.msg}"
    file = version.__code__.co_filename if isinstance(version, FunctionType) else None
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file in (None, frame.filename)]
    where = f" in line {lines[-1]}" if lines else ""
    if isinstance(error, TimeoutError):
        return f"no answer within {SECONDS} seconds: the function does not end{where and ' (it was' + where + ')'}"
    return f"{type(error).__name__}{where}: {error}"


def same(expected: object, got: object, *, exact: bool = True) -> bool:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return False
        if exact:
            return torch.equal(expected, got)
        return torch.allclose(expected.double(), got.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(expected[k], got[k], exact=exact) for k in expected)
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(same(a, b, exact=exact) for a, b in zip(expected, got, strict=True))
    return bool(expected == got)


def shown(value: object) -> str:
    """Return a value as text that is short enough to read."""
    if isinstance(value, Tensor):
        numbers = value.tolist() if value.numel() <= 24 else [*value.flatten()[:16].tolist(), "..."]
        text = f"{_rounded(numbers)}, shape {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, dict):
        text = "; ".join(f"{name} {shown(part)}" for name, part in value.items())
    else:
        text = repr(value)
    return text if len(text) <= 600 else text[:600] + " ..."


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
