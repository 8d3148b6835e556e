"""Imports go from the course to the lab to the engine and never back, in functions and for type checkers too."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = ["nanoinfer", "nanoinfer_lab", "nanoinfer_course"]  # a package imports itself and those before it
FILES = {path.relative_to(ROOT).as_posix(): path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))}
PASSED_ON = "nanoinfer/testing/"  # the names of the lab's checks, for users' tests


def imported_packages(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.partition(".")[0] for name in found} & {*ORDER}


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_itself_and_those_before_it(package):
    files = {name: path for name, path in FILES.items() if name.startswith((f"{package}/", f"{package}."))}
    assert len(files) > 10
    allowed = {*ORDER[: ORDER.index(package) + 1]}
    found = {name: imported_packages(path.read_text(encoding="utf-8")) - allowed for name, path in files.items()}
    assert {name for name, others in found.items() if others} <= {name for name in FILES if name.startswith(PASSED_ON)}


def test_an_import_that_goes_back_would_be_seen():
    source = "if TYPE_CHECKING:\n    import nanoinfer_lab.bench\ndef f():\n    from nanoinfer_course.learn import track\n"
    assert imported_packages(source) == {"nanoinfer_lab", "nanoinfer_course"}


def test_the_engine_names_lab_and_course_only_where_it_lists_commands_and_passes_names_on():
    def names(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and bool(re.match(r"nanoinfer_(lab|course)\b", str(node.value)))

    engine = {name: path for name, path in FILES.items() if name.startswith("nanoinfer/")}
    found = {name for name, path in engine.items() if any(map(names, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))}
    assert found == {"nanoinfer/cli/main.py", "nanoinfer/compat/moved_modules.py"}
