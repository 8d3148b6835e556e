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


def _task(name: str, function: str, **fields: object) -> Task:
    module, _, qualname = function.partition(":")
    return Task(name=name, function=Function(f"nanoinfer.{module}", qualname), **fields)  # type: ignore[arg-type]


TRACK = [_task(name, **fields) for name, fields in _TASKS.items()]
NAMES = [task.name for task in TRACK]
Named = TypeVar("Named", bound=Any)


def find(name: str) -> Task:
    """Return the task with this name, or with this file (`t01_accept_drafts.py`). Raises: InvalidValueError."""
    return named(TRACK, name)


def named(tasks: Sequence[Named], name: str) -> Named:
    """Return the one of these tasks that has this name or this file. Raises: InvalidValueError."""
    name, by_name = re.sub(r"^[st]\d\d_|\.py$", "", Path(name).name), {task.name: task for task in tasks}
    if name not in by_name:
        raise InvalidValueError(f"there is no task {name!r}; {suggest(name, list(by_name))}")
    return by_name[name]
