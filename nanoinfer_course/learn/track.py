"""The tasks in the order of the course, which tasks.toml describes."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanoinfer.errors import InvalidValueError, suggest
from nanoinfer_course.learn.check import Task
from nanoinfer_course.learn.workbook import Function

_TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, str] = _TASKS.pop("groups")  # name -> title
SELVES: dict[str, str] = _TASKS.pop("selves")  # class -> what `self` is in its methods


def _task(name: str, function: str, **fields: object) -> Task:
    module, _, qualname = function.partition(":")
    of_class = SELVES.get(qualname.partition(".")[0], "")
    return Task(name=name, function=Function(f"nanoinfer.{module}", qualname), of_class=of_class, **fields)  # type: ignore[arg-type]


TRACK = [_task(name, **fields) for name, fields in _TASKS.items()]
NAMES = [task.name for task in TRACK]
Named = TypeVar("Named", bound=Any)


def find(name: str) -> Task:
    """Return the task with this name, number or file (`argmax`, `1`, `t01_argmax.py`). Raises: InvalidValueError."""
    return named(TRACK, name)


def named(tasks: Sequence[Named], name: str) -> Named:
    """Return the one of these tasks that has this name, number or file. Raises: InvalidValueError."""
    stem, by_name = re.sub(r"^[st]\d\d_|\.py$", "", Path(name).name), {task.name: task for task in tasks}
    by_number = {str(number): task for number, task in enumerate(tasks, 1)}
    found = by_name.get(stem) or by_number.get(re.sub(r"^[st]?0*", "", stem))
    if found is None:
        raise InvalidValueError(f"there is no task {name!r}; {suggest(stem, list(by_name))}")
    return found
