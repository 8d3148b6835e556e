"""The learner's folder: files that are cut from the engine's source, and the learner's progress.

In: a Task. Out: a file with the imports that its function needs, its signature and docstring, and an empty body. The source is
read from the installed package, so no second copy can become stale.
"""

import ast
import hashlib
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from nanoinfer.errors import InvalidValueError

EMPTY = "raise NotImplementedError  # your code"
PROGRESS = ".progress.json"

AGENTS = """\
# For an assistant in this folder

The person here learns how an LLM inference engine works by writing its functions. Teach, and do not solve:

- Never write, complete or paste the body of a task, and do not read the engine's own version of it for them.
- Ask what they expect, let them work a small case on paper, and point at the docstring.
- `nanoinfer learn check TASK` shows the smallest case that fails. Explain that case, not the cure.
- `nanoinfer learn hint TASK` gives a hint. Offer it before you give a hint of your own.
"""

Version = Callable[..., Any]  # the engine's own version of a function, or a learner's
_ORIGINALS: dict[Version, Version] = {}  # installed version -> the engine's own


@dataclass(frozen=True)
class Function:
    """A function or a method of the engine. `owner` is its module or its class."""

    module: str
    qualname: str

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    @property
    def owner(self) -> object:
        owner: object = importlib.import_module(self.module)
        for part in self.qualname.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner

    @property
    def original(self) -> Version:
        """The engine's own version, even while a learner's is installed."""
        found: Version = getattr(self.owner, self.name)
        return _ORIGINALS.get(found, found)

    @property
    def source(self) -> str:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(self.original)))

    @property
    def parsed(self) -> ast.FunctionDef:
        (function,) = ast.parse(self.source).body
        assert isinstance(function, ast.FunctionDef), f"{self.qualname} is a function"
        return function

    @property
    def header(self) -> str:
        """Signature and docstring, with an empty body."""
        first = self.parsed.body[0]
        num_lines = first.end_lineno if ast.get_docstring(self.parsed) else first.lineno - 1
        return "\n".join([*self.source.splitlines()[:num_lines], f"    {EMPTY}", ""])

    @property
    def imports(self) -> str:
        """Return lines that import every global name that the function uses, from where it was defined."""
        names = vars(importlib.import_module(self.module))
        used = {node.id for node in ast.walk(self.parsed) if isinstance(node, ast.Name)} - {self.name}
        modules: list[str] = []
        origins: dict[str, list[str]] = {}  # module -> names
        for name in sorted(used & names.keys()):
            value = names[name]
            if inspect.ismodule(value):
                modules.append(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
            else:
                is_named = getattr(value, "__name__", None) == name  # otherwise a constant, or imported under another name
                module = inspect.getmodule(value) if is_named else None
                origins.setdefault(self.module if module is None else module.__name__, []).append(name)
        return "\n".join([*modules, *(f"from {origin} import {', '.join(origins[origin])}" for origin in sorted(origins))])


class Workbook:
    """A folder with a file per task."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        """names: the names of the tasks, in the order of the track."""
        self.folder = folder
        self._files = {name: folder / f"t{number:02}_{name}.py" for number, name in enumerate(names, 1)}

    @classmethod
    def here(cls, names: list[str]) -> "Workbook":
        """Return the workbook in the current folder. Raises: InvalidValueError if there is none."""
        workbook = cls(Path.cwd(), names)
        if not (workbook.folder / PROGRESS).exists():
            raise InvalidValueError(
                "this folder is no workbook; write one by: nanoinfer learn start FOLDER, and go into FOLDER"
            )
        return workbook

    def write(self, headers: dict[str, str]) -> None:
        """Write all tasks into a new or empty folder. headers: task name -> the text of its file."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InvalidValueError(f"{self.folder} exists and is not empty; give a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in headers.items():
            self._files[name].write_text(text, encoding="utf-8")
        (self.folder / "AGENTS.md").write_text(AGENTS, encoding="utf-8")
        self._save({"passed": {}, "hints": {}})

    def file(self, name: str) -> Path:
        return self._files[name]

    def status(self, name: str) -> str:
        """Return "missing", "empty", "written", or "passed" if the file has passed its check and is unchanged."""
        if not self.file(name).exists():
            return "missing"
        if self._progress["passed"].get(name) == self._digest(name):
            return "passed"
        return "empty" if EMPTY.split("  #")[0] in self.file(name).read_text(encoding="utf-8") else "written"

    def mark(self, name: str, *, passed: bool) -> None:
        progress = self._progress
        progress["passed"].pop(name, None)
        if passed:
            progress["passed"][name] = self._digest(name)
        self._save(progress)

    def next_hint(self, name: str, most: int) -> int:
        """Return how many hints to show now: one more than last time, up to `most`."""
        progress = self._progress
        progress["hints"][name] = min(progress["hints"].get(name, 0) + 1, most)
        self._save(progress)
        return int(progress["hints"][name])

    def replace_body(self, name: str, source: str) -> None:
        """Put a whole function in place of the last function in the task's file."""
        text = self.file(name).read_text(encoding="utf-8")
        start = text.rindex("\ndef ") + 1
        self.file(name).write_text(text[:start] + source, encoding="utf-8")

    def load(self, name: str, function: str) -> Version:
        """Run the task's file and return its function. Errors of the file are not caught."""
        module = ModuleType(f"nanoinfer_workbook.{name}")  # `installed` puts other tasks' versions into it, too
        module.__file__ = str(self.file(name))
        sys.modules[module.__name__] = module
        text = self.file(name).read_text(encoding="utf-8")
        exec(compile(text, module.__file__, "exec"), module.__dict__)  # the learner's own file, as Python would import it
        version: Version = getattr(module, function)
        return version

    @property
    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))
        return progress

    def _save(self, progress: dict[str, Any]) -> None:
        (self.folder / PROGRESS).write_text(json.dumps(progress, indent=1), encoding="utf-8")

    def _digest(self, name: str) -> str:
        return hashlib.sha256(self.file(name).read_bytes()).hexdigest()


@contextmanager
def installed(functions: dict[Function, Version]) -> Iterator[dict[Function, int]]:
    """Let the engine call these versions instead of its own. Yields how often each was called.

    Every module that has imported the original gets the new version. LLM(enforce_eager=True, attention_backend="reference")
    calls these functions themselves, and no compiled code.
    """
    calls = dict.fromkeys(functions, 0)
    undo: list[tuple[object, str, object]] = []
    for function, version in functions.items():
        original = function.original
        counted = _counted(function, version, original, calls)
        owners: list[object] = [function.owner]
        if inspect.ismodule(function.owner):
            owners = [module for key, module in list(sys.modules.items()) if key.startswith("nanoinfer")]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if value is original:
                    undo.append((owner, name, value))
                    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        for owner, name, value in undo:
            _ORIGINALS.pop(getattr(owner, name), None)
            setattr(owner, name, value)


def _counted(function: Function, version: Version, original: Version, calls: dict[Function, int]) -> Version:
    @wraps(version)
    def counted(*args: object, **kwargs: object) -> object:
        calls[function] += 1
        return version(*args, **kwargs)

    _ORIGINALS[counted] = original
    return counted
