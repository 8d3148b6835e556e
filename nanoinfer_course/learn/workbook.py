"""The learner's folder: files that are cut from the engine's source, and the learner's progress.

In: a Task. Out: a file with the imports that its function needs, its signature and docstring, and an empty body. The source is
read from the installed package, so no second copy can become stale. No module of the engine is imported for it, because
many import torch, which takes a second.
"""

import ast
import hashlib
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import nanoinfer
from nanoinfer.errors import InvalidValueError

WIDTH = 79  # columns of the learner's files, and of what is printed
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
        """The function's lines, without its decorators."""
        lines, _ = read_module(self.module)
        return textwrap.dedent("\n".join([*lines[self._node.lineno - 1 : self._node.end_lineno], ""]))

    @property
    def header(self) -> str:
        """Signature and docstring, with an empty body."""
        first = self._node.body[0]
        end = first.end_lineno if ast.get_docstring(self._node) else first.lineno - 1
        return "\n".join([*self.source.splitlines()[: end - self._node.lineno + 1], f"    {EMPTY}", ""])

    @property
    def imports(self) -> str:
        """The lines that import every global name that the function uses."""
        used = {node.id for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.Name)} - {self.name}
        lines: list[str] = []
        origins: dict[str, list[str]] = {}  # module -> names
        for node in read_module(self.module)[1].body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in node.names:
                    if (name.asname or name.name) in used and isinstance(node, ast.ImportFrom):
                        origins.setdefault(str(node.module), []).append(ast.unparse(name))
                    elif (name.asname or name.name) in used:
                        lines.append(f"import {ast.unparse(name)}")
            else:
                origins.setdefault(self.module, []).extend(sorted(names_of(node) & used))
        return "\n".join([*lines, *(f"from {origin} import {', '.join(names)}" for origin, names in origins.items() if names)])

    def made(self) -> Version:
        """The engine's own version, made from its source as a learner's file makes theirs."""
        names: dict[str, Any] = {}
        exec(compile(f"{self.imports}\n{self.source}", self.qualname, "exec"), names)
        version: Version = names[self.name]
        return version

    @property
    def _node(self) -> Any:
        return _definition(self.module, self.qualname)


def filled(text: str, later: str = "", width: int = WIDTH) -> str:
    """Wrap a paragraph. later: what all lines but the first begin with."""
    return textwrap.fill(text.strip("\n"), width, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)


@cache
def read_module(name: str) -> tuple[list[str], ast.Module]:
    """Return the lines and the syntax tree of a module of the engine or of the course, without importing it."""
    path = Path(nanoinfer.__path__[0]).parent.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def first_line(node: ast.stmt) -> int:
    """Return the number of a statement's first line, which is that of the first decorator if there is one."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _definition(module: str, qualname: str) -> Any:
    """Return the syntax tree of a class, a function or a method, and of the module for ""."""
    found: Any = read_module(module)[1]
    for part in filter(None, qualname.split(".")):
        found = next(node for node in found.body if part in names_of(node))
    return found


def names_of(node: ast.AST) -> set[str]:
    """Return the names that a statement defines. Attributes of self count as names."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {target.removeprefix("self.") for target in _targets(node)}


def _targets(node: ast.AST) -> list[str]:
    """Return what an assignment assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    is_assignment = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    return [ast.unparse(part) for target in targets if is_assignment for part in getattr(target, "elts", [target])]


def declared(entry: str, learned: str = "") -> tuple[str, list[str]]:
    """Cut declarations out of the source.

    Args:
        entry: "module name ...", or "module:Class attribute ...", with modules of nanoinfer.
        learned: the name of the learner's function.

    Returns:
        The module or the class, and a line for each name: its signature or its type, its comment, and who writes it.

    >>> declared("sampling.draw ONE thresholds")[1][0]
    'ONE = 2.0 ** BITS  # the weight of the most probable token'
    """
    place, *names = entry.split()
    module, _, class_name = place.partition(":")
    lines, _ = read_module(f"nanoinfer.{module}")
    scope = _definition(f"nanoinfer.{module}", class_name)
    documented = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", ast.get_docstring(scope) or "", re.MULTILINE))
    found = []
    for name in names:
        node: Any = next((node for node in ast.walk(scope) if name in names_of(node)), None)
        assert node is not None, f"{place} defines {name}"
        _, _, comment = lines[node.lineno - 1].partition("  # ")
        if isinstance(node, ast.FunctionDef):
            is_field = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
            kind = f"({arguments}) -> {ast.unparse(node.returns)}" if node.returns else f"({arguments})"
            kind = kind.replace("() -> ", ": ") if is_field else kind
            comment = (ast.get_docstring(node) or "").partition("\n")[0]
        elif isinstance(node, ast.AnnAssign):
            kind = f": {ast.unparse(node.annotation)}"
        elif isinstance(node.targets[0], ast.Name):
            kind = f" = {ast.unparse(node.value)}"
        else:  # self.name = the argument of the same type
            types = {one.arg: one.annotation for one in ast.walk(scope) if isinstance(one, ast.arg) and one.annotation}
            kind = f": {ast.unparse(types[value])}" if (value := ast.unparse(node.value)) in types else ""
        comment = comment or " ".join(documented.get(name, "").split())
        comment = re.sub(r"(?:^|: )the (scheduler|block manager)\b", r". Written by the \1", comment)
        methods = [one for one in scope.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("__")]
        writers = [one.name for one in methods if any(f"self.{name}" in _targets(part) for part in ast.walk(one))]
        if writers:
            words = " and ".join("your function" if one == learned else one for one in writers)
            comment = f"{comment.removesuffix('.')}. Written by {words}"
        comment = comment.removeprefix(". ")
        found.append(f"{name}{kind}" + (f"  # {comment}" if comment else ""))
    return f"{class_name}, in nanoinfer.{module}" if class_name else f"nanoinfer.{module}", found


def check_new(folder: Path) -> None:
    """Raises: InvalidValueError if a folder is neither new nor empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidValueError(f"{folder} exists and is not empty; give a new folder")


class Workbook:
    """A folder with a file per task."""

    def __init__(self, folder: Path, names: list[str], kind: str = "t") -> None:
        """names: the names of the tasks, in their order. kind: the letter with which their files begin."""
        self.folder = folder
        old = {path.name[4:-3]: path for path in folder.glob(f"{kind}[0-9][0-9]_*.py")}  # perhaps numbered otherwise
        self._files = {name: old.get(name, folder / f"{kind}{number:02}_{name}.py") for number, name in enumerate(names, 1)}

    @classmethod
    def here(cls, names: list[str]) -> "Workbook":
        """Return the workbook in the current folder. Raises: InvalidValueError if there is none."""
        workbook = cls(Path.cwd(), names)
        if not (workbook.folder / PROGRESS).exists():
            raise InvalidValueError(
                "this folder is no workbook; write one by: nanoinfer learn start FOLDER, and go into FOLDER"
            )
        return workbook

    def write(self, texts: dict[str, str]) -> None:
        """Write all tasks into a new or empty folder. texts: task name -> the text of its file."""
        check_new(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            self._files[name].write_text(text, encoding="utf-8")
        about = Path(__file__).with_name("templates").joinpath("workbook.md.txt").read_text(encoding="utf-8")
        for name, text in (("AGENTS.md", AGENTS), ("README.md", about)):
            (self.folder / name).write_text(text, encoding="utf-8")
        self._save({"passed": {}, "hints": {}})

    def file(self, name: str) -> Path:
        return self._files[name]

    def saved(self) -> dict[str, int]:
        """Return when each task's file was last saved, in nanoseconds. A file that is missing is left out."""
        return {name: file.stat().st_mtime_ns for name, file in self._files.items() if file.exists()}

    def status(self, name: str) -> str:
        """Return "missing", "empty", "written", or "passed" if the file has passed its check and is unchanged."""
        if not self.file(name).exists():
            return "missing"
        if self._progress["passed"].get(name) == self._digest(name):
            return "passed"
        return "empty" if EMPTY.split("  #")[0] in self.file(name).read_text(encoding="utf-8-sig") else "written"

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
        text = self.file(name).read_text(encoding="utf-8-sig")
        start = text.rindex("\ndef ") + 1
        self.file(name).write_text(text[:start] + source, encoding="utf-8")

    def load(self, name: str, function: str) -> Version:
        """Run the task's file and return its function. Errors of the file are not caught."""
        module = ModuleType(f"nanoinfer_workbook.{name}")  # `installed` puts other tasks' versions into it, too
        module.__file__ = str(self.file(name))
        sys.modules[module.__name__] = module
        text = self.file(name).read_text(encoding="utf-8-sig")
        exec(compile(text, module.__file__, "exec"), module.__dict__)  # the learner's own file, as Python would import it
        version: Version = getattr(module, function)
        return version

    @property
    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8-sig"))
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
    counted = {function: _counted(function, version, calls) for function, version in functions.items()}
    for function, version in counted.items():
        _exchange(function.owner, _ORIGINALS[version], version)
    try:
        yield calls
    finally:
        for function, version in counted.items():
            _exchange(function.owner, version, _ORIGINALS.pop(version))


def _exchange(owner: object, old: Version, new: Version) -> None:
    """Put a function in the place of another, in a class, or in every module of the engine that has imported it."""
    owners = [module for name, module in list(sys.modules.items()) if name.startswith("nanoinfer")]
    for each in owners if inspect.ismodule(owner) else [owner]:
        for name, value in list(vars(each).items()):
            if value is old:
                setattr(each, name, new)


def _counted(function: Function, version: Version, calls: dict[Function, int]) -> Version:
    @wraps(version)
    def counted(*args: object, **kwargs: object) -> object:
        calls[function] += 1
        return version(*args, **kwargs)

    _ORIGINALS[counted] = function.original
    return counted
