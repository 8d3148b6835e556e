"""The export: one file that runs alone, has the engine's tokens, and whose tests refuse what the track's tests refuse."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app
from nanoinfer.errors import InvalidValueError
from nanoinfer_course.learn.export import one_file, reference_file
from nanoinfer_course.learn.tangle import missing_names, repeated_names, simplified, tangle
from nanoinfer_course.learn.track import NAMES, TRACK, find
from nanoinfer_course.learn.workbook import Workbook
from tests.course.learn.test_learn import MUTANTS

# Checks replaced functions in a process that cannot import nanoinfer: prints the tasks whose replacement passes.
GRADE = """
import json, sys
sys.modules.update(dict.fromkeys(("nanoinfer", "transformers", "jaxtyping", "numpy")))
sys.path[:0] = [".", "tests"]
import engine
from cases.check import check
from cases.workbook import TRACK
tasks = {task.name: task for task in TRACK}
for name, source in json.load(sys.stdin):
    namespace = dict(vars(engine))
    exec(source, namespace)
    task = tasks[name]
    if check(task, namespace[task.function.qualname.rpartition(".")[2]]) is None:
        print(name)
"""

# task -> (task, a wrong version of its function)
MISTAKES = {
    name: [
        (name, simplified(find(name).function.source.replace(*mutant))) for mutants in of_rules.values() for mutant in mutants
    ]
    for name, of_rules in MUTANTS.items()
}


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    """Keep torch's threads of the processes that these tests start from those of the tests that run beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "one-file"
    result = CliRunner().invoke(app, ["learn", "export", str(folder), "--solved", "--prompts", "1"])
    assert result.exit_code == 0, result.output
    assert "0 of 4 answers differ" in result.output
    return folder


def passing(folder: Path, sources: list[tuple[str, str]]) -> list[str]:
    command = [sys.executable, "-c", GRADE]
    run = subprocess.run(command, cwd=folder, input=json.dumps(sources), capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.slow
def test_the_engine_in_one_file_is_short_clean_and_measured(exported):
    lines = (exported / "engine.py").read_text().splitlines()
    assert not [
        line for line in lines if "import nanoinfer" in line or "from nanoinfer." in line or line.lstrip().startswith("#:")
    ]
    readme = (exported / "README.md").read_text()
    assert "badge/functions-24%20of%2024-brightgreen" in readme
    assert "badge/0%20of%204-answers%20differ-brightgreen" in readme
    options = ["--isolated", "--line-length=128", "engine.py"]
    for command in (["check", "--select=E,F", "--ignore=F722"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *options]
        checked = subprocess.run(ruff, cwd=exported, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_a_mistake_of_each_task_is_refused(exported):
    right = [(name, simplified(find(name).function.source)) for name in NAMES]
    wrong = [mistakes[0] for mistakes in MISTAKES.values()]
    assert passing(exported, right + wrong) == NAMES


@pytest.mark.long
def test_every_mistake_is_refused(exported):
    assert passing(exported, [each for mistakes in MISTAKES.values() for each in mistakes]) == []


@pytest.mark.long
def test_the_tests_of_the_exported_engine_pass(exported):
    environment = os.environ | {"PYTEST_ADDOPTS": "-p no:cacheprovider"}
    run = subprocess.run([sys.executable, "-m", "pytest"], cwd=exported, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.fixture
def book(tmp_path, monkeypatch) -> Workbook:
    """A workbook with the engine's own functions, in the current folder."""
    workbook = Workbook(tmp_path / "book", NAMES)
    workbook.write({task.name: task.text for task in TRACK})
    for task in TRACK:
        workbook.replace_body(task.name, task.function.source)
        workbook.mark(task.name, passed=True)
    monkeypatch.chdir(workbook.folder)
    return workbook


@pytest.mark.slow
def test_a_learners_function_is_in_the_file_with_its_helper_and_its_import(book):
    file = book.file("accept_drafts")
    text = file.read_text()
    start = text.rindex("\ndef ")
    signature = text[start:].split('"""')[0]
    helper = "\ndef equal_beginning(a, b):\n    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b))))\n"
    body = f"{signature}return equal_beginning(self.draft_token_ids, sampled_token_ids)\n"
    file.write_text(f"{text[:start]}\nfrom itertools import takewhile\n\n{helper}\n{body}")
    engine = one_file(TRACK, {name: book.file(name) for name in NAMES}, "mine")
    assert engine.count("from itertools import takewhile\n") == engine.count("\ndef equal_beginning(a, b):\n") == 1
    assert "        return equal_beginning(self.draft_token_ids, sampled_token_ids)\n" in engine
    lines = engine.splitlines()
    assert lines.count("import torch") == lines.count("from torch import Tensor, nn") == 1
    assert "from torch import Tensor" not in lines
    assert not [line for line in lines if line.startswith(("from jaxtyping", "from nanoinfer"))]
    for name, helper in (("argmax", "draw_from_weights"), ("draw", "equal_beginning")):
        before = book.file(name).read_text()
        start = before.rindex("\ndef ")
        book.file(name).write_text(f"{before[:start]}\ndef {helper}():\n    pass\n\n{before[start:]}")
        with pytest.raises(InvalidValueError, match="more than once; rename"):
            one_file(TRACK, {name: book.file(name) for name in NAMES}, "mine")
        book.file(name).write_text(before)


@pytest.mark.slow
def test_the_file_has_all_that_a_task_says_one_has(exported):
    tree = ast.parse((exported / "engine.py").read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    defined |= {
        ast.unparse(node).removeprefix("self.") for node in ast.walk(tree) if isinstance(getattr(node, "ctx", 0), ast.Store)
    }
    assert {name for task in TRACK for entry in task.have for name in entry.split()[1:]} <= defined


def test_missing_tasks_and_names_are_refused(book):
    book.file("draw").unlink()
    book.file("argmax").write_text(book.file("argmax").read_text() + "\n# changed\n")
    result = CliRunner().invoke(app, ["learn", "export", "mine"])
    assert result.exit_code == 1
    assert "an export needs 24 passed tasks, and 2 are not" in result.output
    for name in ("draw", "argmax", "learn solve TASK", "--solved"):
        assert name in result.output
    book.replace_body("argmax", find("argmax").function.source.replace("logits.max(", "engines_only(logits, "))
    book.file("draw").write_text(find("draw").text)
    book.replace_body("draw", find("draw").function.source)
    for name in ("argmax", "draw"):
        book.mark(name, passed=True)
    result = CliRunner().invoke(app, ["learn", "export", "mine"])
    assert (result.exit_code, "your files read engines_only, which" in result.output) == (1, True)
    assert "is not empty" in CliRunner().invoke(app, ["learn", "export", ".", "--solved"]).output


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if x:\n    a()\n    self.observer.told(x)", "if x:\n    a()"),
        ("def f(self, n: int, observer: O = NOBODY) -> None:\n    self.observer = observer\n    a()",
         "def f(self, n: int) -> None:\n    a()"),
        ("def f(\n    self,\n    n: int = 1,\n    observer: O = NOBODY,\n) -> None:\n    a()",
         "def f(self, n: int = 1) -> None:\n    a()"),
        ("def f():\n    n = g()\n    self.observer.told(n)\n    b()", "def f():\n    b()"),
        ("def f():\n    n = self.g(1)\n    self.observer.told(n)", "def f():\n    self.g(1)"),
        ('def f():\n    """One.\n\n    Two.\n    """\n    return 1', 'def f():\n    """One."""\n    return 1'),
        ('class A:\n    """One.\n\n    Two.\n\n    >>> A()\n    """', 'class A:\n    """One.\n\n    Two.\n    """'),
        ('class A:\n    """One.\n\n    Attributes:\n        a: two.\n    """\n    a: int',
         'class A:\n    """One."""\n    a: int'),
        ('def f(a: "A | None", b: Float[Tensor, "rows columns"]) -> list["A"]:\n    return []',
         'def f(a: A | None, b: Float[Tensor, "rows columns"]) -> list[A]:\n    return []'),
        ('n: Annotated[int, Ge(1), Option(), Doc("Number of answers. More words.")] = 1', "n: int = 1  # Number of answers"),
    ],
)  # fmt: skip
def test_what_one_file_does_not_need_is_left_out(before, after):
    assert simplified(before) == after


def test_only_what_is_mentioned_is_taken():
    text = tangle("#: from nanoinfer.scheduling.pool\n", {}, {"Pool", ".take", "hold"})
    assert "def take(self)" in text
    assert "def __init__" in text
    assert "def hold" not in text  # a variable of this name is no method
    assert "NO_BLOCK" not in text


def test_definitions_come_in_the_order_of_the_template():
    template = "class Pool:\n    #: from nanoinfer.scheduling.pool.Pool import hold, __init__\n\n    def take(self): ...\n"
    text = tangle(template, {}, {"Pool", ".hold", ".take"})
    assert [line.split("(")[0].strip() for line in text.splitlines() if "def " in line] == [
        "def hold",
        "def __init__",
        "def take",
    ]
    assert '"""' in text.splitlines()[1]  # the docstring of the package's class


def test_the_committed_file_is_not_older_than_the_source_and_defines_each_name_once():
    text = (Path(__file__).parents[3] / "one_file" / "engine.py").read_text(encoding="utf-8")
    assert text == reference_file(), "run: make one-file"
    assert (missing_names(text), repeated_names(text)) == (set(), set())
