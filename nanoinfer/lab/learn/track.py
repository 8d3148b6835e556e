"""The tasks in the order of the course, which tasks.toml describes."""

import re
import tomllib
from pathlib import Path

from nanoinfer.errors import InvalidValueError, suggest
from nanoinfer.lab.learn.check import Task
from nanoinfer.lab.learn.workbook import Function

_TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, str] = _TASKS.pop("groups")  # name -> title


def _task(name: str, function: str, **fields: object) -> Task:
    module, _, qualname = function.partition(":")
    return Task(name=name, function=Function(f"nanoinfer.{module}", qualname), **fields)  # type: ignore[arg-type]


TRACK = [_task(name, **fields) for name, fields in _TASKS.items()]
NAMES = [task.name for task in TRACK]


def find(name: str) -> Task:
    """Return the task with this name, or with this file (`t01_accept_drafts.py`). Raises: InvalidValueError."""
    name = re.sub(r"^t\d\d_|\.py$", "", Path(name).name)
    if name not in NAMES:
        raise InvalidValueError(f"there is no task {name!r}; {suggest(name, NAMES)}")
    return TRACK[NAMES.index(name)]
