"""Imports go from the course to the lab to the engine and never back, in functions and for type checkers too."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ORDER = ["nanoinfer", "nanoinfer_lab", "nanoinfer_course"]  # a package imports itself and those before it


def imported_packages(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.partition(".")[0] for name in found} & {*ORDER}


def test_a_package_imports_only_itself_and_those_before_it_and_the_engine_names_others_in_two_files():
    naming = set()
    for number, package in enumerate(ORDER):
        for path in sorted((ROOT / package).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            if not any(other in text for other in ORDER[number + 1 :]):
                continue
            tree = ast.parse(text)
            if not name.startswith("nanoinfer/testing/"):  # the names of the lab's checks, for users' tests
                assert imported_packages(tree) <= {*ORDER[: number + 1]}, name
            values = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            if number == 0 and any(re.match(r"nanoinfer_(lab|course)\b", value) for value in values):
                naming.add(name)
    assert naming == {"nanoinfer/cli/main.py", "nanoinfer/compat/moved_modules.py"}


def test_an_import_that_goes_back_would_be_seen():
    source = "if TYPE_CHECKING:\n    import nanoinfer_lab.bench\ndef f():\n    from nanoinfer_course.learn import track\n"
    assert imported_packages(ast.parse(source)) == {"nanoinfer_lab", "nanoinfer_course"}
