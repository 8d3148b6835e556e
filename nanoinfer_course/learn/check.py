"""Compare a learner's function with the engine's, smallest cases first. Tasks without tensors need no torch.

In: a Task and a function. Out: a Failure in plain words, or None.
"""

import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pprint import pformat
from textwrap import indent
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

from nanoinfer_course.learn.workbook import WIDTH, Function, Version, declared, filled

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """An input, and a function that observes what a version of the task's function does with it."""

    given: Mapping[str, object]  # all of the input, by name
    observe: Callable[[Version], object]  # calls the version with the input, and returns the visible effects
    exact: bool = True  # whether floating-point numbers must have the same bits
    picture: str = ""  # a drawing of the input for a terminal. "": words are enough
    # returns what must be equal in the effects of both versions. By default that is all of them
    judge: Callable[[Any], object] = lambda seen: seen
    comes_last: bool = False  # whether the case is tried after the others, smaller or not

    @property
    def words(self) -> str:
        """The input for a terminal."""
        lines = []
        for name, value in self.given.items():
            text = written(value)
            lines.append(f"{name} = {text}" if "\n" not in text and len(name + text) < WIDTH - 14 else f"{name} =\n{text}")
        return "\n".join([*lines, *(filled(line, "      ", WIDTH - 12) for line in self.picture.splitlines())])


@dataclass(frozen=True)
class Task:
    """A function of the engine for the learner to write. tasks.toml describes the fields."""

    name: str
    function: Function
    title: str
    group: str
    minutes: int
    level: int
    notebook: str
    about: str
    hints: list[str]
    rules: dict[str, str]
    have: list[str]
    cases_in: str
    of_class: str = ""  # what `self` is. Empty: the function is no method

    def cases(self) -> Iterable[Case]:
        """Make the cases that test the function."""
        module = import_module(f"nanoinfer_course.learn.{self.cases_in}")
        cases: Iterable[Case] = module.CASES[self.name]()
        return cases

    @property
    def role(self) -> str:
        """Whose method the function is, and what self is there."""
        place = f"{self.function.module.replace('.', '/')}.py"
        owner, _, name = self.function.qualname.rpartition(".")
        if not owner:
            return f"This is the function {name} of {place}. It has no self: all that it needs is in its arguments."
        return f"This is the method {name} of the class {owner} in {place}. self is {self.of_class}."

    @property
    def places(self) -> list[tuple[str, list[str]]]:
        """What the function may use: modules and classes of the engine, and the declarations of each."""
        return [declared(entry, self.function.name) for entry in self.have]

    @property
    def lesson(self) -> str:
        """Which part of a notebook explains the task."""
        lesson, _, section = self.notebook.partition("#")
        return f'Explained in the notebook "{lesson.replace("_", " ")}", section "{section}".'

    @property
    def code(self) -> str:
        """The imports that the function needs, and its head with an empty body."""
        imports = self.function.imports
        if self.cases_in in ("model", "sampling") and "import torch\n" not in imports:
            imports = f"import torch\n{imports}"  # the engine's version does without it, the learner's may not
        return f"{imports}\n\n\n{self.function.header}".lstrip("\n")

    @property
    def text(self) -> str:
        """The text of the learner's file."""
        paragraphs = [
            filled(f"{self.name}: {self.title}. About {self.minutes} minutes, difficulty {self.level} of 3."),
            filled(self.role),
            filled(self.about),
            "\n".join(["What is checked:", *(filled(f"- {rule}", "  ") for rule in self.rules.values())]),
        ]
        for place, declarations in self.places:
            paragraphs.append("\n".join([f"You have, of {place}:", *(filled(f"  {line}", "      ") for line in declarations)]))
        paragraphs.append(filled(self.lesson))
        paragraphs.append(f"Check it: nanoinfer learn check {self.name}. Hints: nanoinfer learn hint {self.name}.")
        about = "\n\n".join(paragraphs)
        return f'"""{about}\n"""\n\n{self.code}'


@dataclass(frozen=True)
class Failure:
    """The reason why a version was refused. It was given some input, and something was expected and not got."""

    given: str
    expected: str
    got: str

    def __str__(self) -> str:
        parts = {"given": self.given, "expected": self.expected, "got": self.got}
        return "\n".join(f"{name:<10}" + indent(text, " " * 10).lstrip() for name, text in parts.items())


def calling(picture: str = "", *, exact: bool = True, comes_last: bool = False, **given: Any) -> Case:
    """Return a case that calls a version with copies of these arguments, in their order."""

    def observe(version: Version) -> object:
        return version(*(value.clone() if is_tensor(value) else value for value in given.values()))

    return Case(given, observe, exact, picture, comes_last=comes_last)


def check(task: Task, version: Version) -> Failure | None:
    """Return the smallest case in which the version differs from the engine's."""
    own = task.function.made()
    for case in sorted(task.cases(), key=_size):
        expected = case.observe(own)
        try:
            got = case.observe(version)
        except (Exception, SystemExit, GeneratorExit) as error:
            file = version.__code__.co_filename if isinstance(version, FunctionType) else ""
            return Failure(case.words, written(expected), filled(describe_error(error, file), width=WIDTH - 12))
        with suppress(Exception):  # the judge expects a result of the right type
            if same(case.judge(expected), case.judge(got), exact=case.exact):
                continue
        if isinstance(expected, dict) and isinstance(got, dict):  # the first part that differs is enough
            name = next((n for n in expected if not same(expected[n], got.get(n), exact=case.exact)), None)
            if name is not None:
                expected, got = {name: expected[name]}, {name: got.get(name)}
        return Failure(case.words, written(expected), written(got))
    return None


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the running code after some seconds, if the system has such a timer."""
    if "SIGALRM" not in signal.Signals.__members__:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_error(error: BaseException, file: str) -> str:
    """Describe an error in one line, with the line of the learner's file and the function that this line called."""
    if isinstance(error, NotImplementedError):
        return "nothing: the function is not written yet"
    if isinstance(error, SyntaxError):
        return f"a SyntaxError in line {error.lineno}: {error.msg}"
    where = called = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            where, called = f" in line {frame.lineno}", ""
        elif where:
            called = called or f", inside {frame.name}"
    if isinstance(error, TimeoutError):
        return f"{error}: " + (f"the function does not end (it was{where})" if where else "is the machine busy? Check again")
    return f"{type(error).__name__}{where}{called}: {error}"


def written(value: object) -> str:
    """Return all of a value as text. Numbers of a tensor have five digits."""
    if is_tensor(value):
        kind = str(value.dtype).removeprefix("torch.")
        numbers = pformat(_rounded(value.tolist()), width=WIDTH - 12, compact=True)
        return f"{kind} {list(value.shape)}{chr(10) if len(numbers) > 30 else ' '}{numbers}"
    if isinstance(value, dict):
        return "\n".join(f"{name}: {written(part)}" for name, part in value.items())
    if isinstance(value, tuple) and any(map(is_tensor, value)):
        return "\n".join(map(written, value))
    return pformat(value, width=WIDTH - 12, compact=True)


def same(expected: object, got: object, *, exact: bool = True) -> bool:
    if is_tensor(expected) and is_tensor(got):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return False
        if exact:
            return bool(expected.equal(got))
        return bool(expected.double().allclose(got.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))
    if type(expected) is not type(got):
        return False
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(expected[k], got[k], exact=exact) for k in expected)
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(same(a, b, exact=exact) for a, b in zip(expected, got, strict=True))
    return bool(expected == got)


def is_tensor(value: object) -> "TypeGuard[Tensor]":
    """Whether a value is a tensor. Without torch there is none."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def _rounded(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [*map(_rounded, numbers)]
    return float(f"{numbers:.5g}") if isinstance(numbers, float) else numbers


def _size(case: Case) -> tuple[bool, int]:
    return case.comes_last, len(case.picture) + sum(
        4 * value.numel() if is_tensor(value) else len(repr(value)) for value in case.given.values()
    )
