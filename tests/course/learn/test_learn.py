"""The learner's track: the engine's own functions pass, plausible wrong ones do not, and the commands keep their promises."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from nanoinfer.attention.dense import causal_attention
from nanoinfer.cli.main import app
from nanoinfer.features.quantization.rounding import quantize
from nanoinfer.scheduling.prefix_index import Prefix
from nanoinfer_course import cli as learn
from nanoinfer_course.learn import speed
from nanoinfer_course.learn.check import check
from nanoinfer_course.learn.export import Own
from nanoinfer_course.learn.track import NAMES, TRACK, find
from nanoinfer_course.learn.workbook import Workbook, installed
from nanoinfer_lab.bench import ladder
from tests.lab.testing.mutants import FEATURES

KNOWN = {name for kind in (torch, torch.Tensor, torch.finfo, str, list, dict) for name in dir(kind)}
# What is replaced in the engine's source of each task: for each rule, mistakes that a learner makes, and correct versions.
REPLACED = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))
MUTANTS = REPLACED["mistakes"]
WITHOUT_TENSORS = [task.name for task in TRACK if task.cases_in in ("scheduling", "text")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call `nanoinfer learn` with these arguments inside a workbook."""
    assert CliRunner().invoke(app, ["learn", "start", str(tmp_path / "book")]).exit_code == 0
    monkeypatch.chdir(tmp_path / "book")
    return lambda *arguments, **given: CliRunner().invoke(app, ["learn", *arguments], **given)


def version_of(task, old="", new=""):
    """The engine's function with a piece of its source replaced."""
    source = task.function.source
    assert old in source, f"{task.name}: {old!r} is not in the source any more"
    namespace = {"Prefix": Prefix}
    exec(f"{task.function.imports}\n{source.replace(old, new)}", namespace)
    return namespace[task.function.name]


@pytest.mark.slow
@pytest.mark.parametrize("task", TRACK, ids=NAMES)
def test_the_engines_own_version_passes_and_every_plausible_mistake_is_found(task):
    assert check(task, version_of(task)) is None
    for rule, mistakes in MUTANTS[task.name].items():
        for old, new in mistakes:
            failure = check(task, version_of(task, old, new))
            assert failure is not None, (rule, old, new)
            assert failure.expected != failure.got
    for old, new in REPLACED["right"].get(task.name, []):
        assert check(task, version_of(task, old, new)) is None, (old, new)


def test_every_rule_of_a_task_stands_in_its_file_and_has_a_mutant():
    assert set(MUTANTS) == set(NAMES)
    for task in TRACK:
        assert list(MUTANTS[task.name]) == list(task.rules), task.name
        text = " ".join(task.text.split())
        assert [rule for rule in task.rules.values() if " ".join(rule.split()) not in text] == []


def test_what_the_engines_version_uses_stands_in_the_tasks_file():
    for task in TRACK:
        about = " ".join([ast.get_docstring(ast.parse(task.text)), task.function.header, *task.hints])
        (function,) = ast.parse(task.function.source).body
        for part in ast.walk(function):
            is_left_out = isinstance(part, ast.If) and any(name in ast.unparse(part.test) for name in FEATURES)
            if is_left_out or isinstance(part, ast.Assert):
                part.test, part.body = ast.Constant(True), []
        nodes = [node for part in function.body for node in ast.walk(part) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in nodes if ast.unparse(node.value) != "self.observer"}
        assert used - set(re.findall(r"\w+", about)) - KNOWN == set(), task.name


def test_a_task_has_a_file_that_shows_no_solution_and_a_section_that_explains_it():
    for task in TRACK:
        function = ast.parse(task.text).body[-1]
        body = function.body[1:] if ast.get_docstring(function) else function.body
        assert [type(statement) for statement in body] == [ast.Raise], task.name
        names = {}
        exec(compile(task.text, task.name, "exec"), names)  # its imports exist
        assert ("torch" in names) == (task.name not in WITHOUT_TENSORS)
        lesson, _, section = task.notebook.partition("#")
        [notebook] = Path(__file__).parents[3].glob(f"notebooks/*_{lesson}.ipynb")
        assert re.search(rf'"## {re.escape(section)}(\\n)?"', notebook.read_text(encoding="utf-8"))


def test_a_failing_case_shows_all_of_its_input():
    failure = str(check(find("rotary"), version_of(find("rotary"), "(-second, first)", "(second, first)")))
    assert [name in failure for name in ("x = float32 [1, 1, 2]", "cos = ", "sin = ")] == [True] * 3
    for name in NAMES:
        lines = str(check(find(name), lambda *args, **more: None)).splitlines()
        assert max(map(len, lines)) < 78, (name, lines)


def test_an_unwritten_workbook_fails_in_plain_words(run):
    result = run("check")
    assert result.exit_code == 1
    assert result.output.count("the function is not written yet") == len(TRACK)
    assert "Traceback" not in result.output
    assert run("list").output == run().output
    lines = run().output.splitlines()
    assert lines[1].startswith("  t01_argmax ")
    assert max(map(len, lines)) < 80


@pytest.mark.slow
def test_a_solved_workbook_passes_and_writes_the_engines_text(run):
    for name in NAMES:
        assert run("solve", name, "--yes").exit_code == 0
    assert run("check").exit_code == 0
    assert "It is your engine now" in run().output
    given = ["Once upon a time", "--seed", "3", "-n", "24"]
    written = run("run", *given).output
    text = CliRunner().invoke(app, ["generate", *given, "--echo", "--enforce-eager"]).output
    assert " ".join(written.split()).startswith(" ".join(text.split()))
    assert "Yours: argmax (" in written
    assert "causal_attention (" in written.split("Passed, but")[0]


def test_one_task_from_mistake_to_solution(run):
    book = Workbook.here(NAMES)
    text = book.file("argmax").read_text()
    book.file("argmax").write_text(text.replace("raise NotImplementedError  # your code", "return logits.argmax(-1)"))
    assert book.status("argmax") == "written"
    result = run("check", "argmax")
    assert (result.exit_code, "given     logits = float32 [1, 2]" in result.output) == (1, True)
    book.file("argmax").write_text(text.replace("raise NotImplementedError  # your code", "return oops"))
    assert re.search(r"got       NameError in line \d+: name 'oops' is not defined", run("check", "argmax").output)
    book.file("argmax").write_text("def argmax(:\n")
    assert "a SyntaxError in line 1" in run("check", "argmax").output
    book.file("argmax").unlink()
    assert "no file t01_argmax.py" in run("check", "argmax").output
    hints = find("argmax").hints
    assert [hints[0] in run("hint", "argmax").output, hints[1] in run("hint", "argmax").output] == [True, True]
    assert run("solve", "argmax", input="n\n").exit_code == 1
    assert run("solve", "argmax", input="y\n").exit_code == 0
    assert {run("check", name).output for name in ("1", "t01", "t01_argmax.py", "argmax")} == {"argmax: passed\n"}
    assert "largest.isfinite()" in book.file("argmax").read_text()
    book.file("argmax").write_text("def argmax(:\n")  # no function of which the beginning could be kept
    assert (run("solve", "argmax", "--yes").exit_code, run("check", "argmax").exit_code) == (0, 0)
    book.file("argmax").write_text(book.file("argmax").read_text() + "\n# changed\n")
    assert book.status("argmax") == "written"


def test_an_error_names_the_function_of_the_engine_that_raises_it(run):
    file = Workbook.here(NAMES).file("match_prefix")
    file.write_text(file.read_text().replace("raise NotImplementedError  # your code", "return list(self.in_blocks(5))"))
    output = " ".join(run("check", "match_prefix").output.split())
    assert re.search(r"got TypeError in line \d+, inside in_blocks: 'int' object is not iterable", output)


def test_a_function_that_does_not_end_is_stopped(run, monkeypatch):
    monkeypatch.setattr("nanoinfer_course.cli.SECONDS", 0.3)
    file = Workbook.here(NAMES).file("accept_drafts")
    file.write_text(file.read_text().replace("raise NotImplementedError  # your code", "while True: pass"))
    assert "no answer within 0.3 seconds: the function does not end (it was in line " in " ".join(
        run("check", "accept_drafts").output.split()
    )


EXITS = {
    "in the function": ("import sys; sys.exit(0)", ""),
    "by a generator's exit": ("raise GeneratorExit", ""),
    "at file level": ("return 0", "raise SystemExit"),
}


@pytest.mark.parametrize("place", EXITS)
def test_a_task_that_exits_has_not_passed(run, place):
    book, (body, end) = Workbook.here(NAMES), EXITS[place]
    book.replace_body("accept_drafts", find("accept_drafts").function.source)
    assert run("check", "accept_drafts").exit_code == 0
    file = book.file("accept_drafts")
    file.write_text(find("accept_drafts").text.replace("raise NotImplementedError  # your code", body) + f"\n\n{end}\n")
    result = run("check", "accept_drafts")
    assert (result.exit_code, book.status("accept_drafts")) == (1, "written")
    assert "accept_drafts: not yet\n" in result.output
    assert ("GeneratorExit" if "Generator" in body else "SystemExit in line") in result.output


ENDS = {
    "os._exit": "import os\nos._exit(0)",
    "at the process's exit": "import atexit, os\natexit.register(os._exit, 0)",
    "another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])",
    "in a thread": "import os, threading, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(60)",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the command runs in this process itself")
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (i > 1)) for i, way in enumerate(ENDS)])
def test_a_task_that_ends_the_process_has_not_passed(run, way):
    book = Workbook.here(NAMES)
    book.file("accept_drafts").write_text(f"{find('accept_drafts').text}\n\n{ENDS[way]}\n")
    command = [sys.executable, "-m", "nanoinfer", "learn", "check", "accept_drafts"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, book.status("accept_drafts")) == (1, "empty")
    says = "accept_drafts: not yet" if way == "at the process's exit" else "error: the workbook's code ended the process"
    assert says in ended.stdout + ended.stderr


def test_every_command_that_runs_the_learners_code_has_a_child_process():
    commands = typer.main.get_group(learn.app).commands
    assert {name for name, command in commands.items() if isinstance(command, learn.ChildProcessCommand)} == {
        *("check", "watch", "run", "ladder", "speed")
    }


def test_a_workbook_of_windows_is_read_solved_and_exported(run):
    book = Workbook.here(NAMES)
    file, source = book.file("accept_drafts"), find("accept_drafts").function.source
    of_windows = b"\xef\xbb\xbf" + file.read_text().replace("\n", "\r\n").encode()
    file.write_bytes(of_windows)
    assert book.status("accept_drafts") == "empty"
    assert "the function is not written yet" in run("check", "accept_drafts").output
    assert run("solve", "accept_drafts", "--yes").exit_code == 0
    file.write_bytes(b"\xef\xbb\xbf" + file.read_text().replace("\n", "\r\n").encode())
    assert run("check", "accept_drafts").output == "accept_drafts: passed\n"
    assert Own.read(file, "num_accepted").source == source.strip()


def test_a_speed_task_that_exits_has_not_passed(run, monkeypatch):
    monkeypatch.setattr("nanoinfer_lab.bench.roofline.measure_bandwidth", lambda device: 1e9)
    Path("s05_drafts.py").write_text("raise SystemExit(0)\n")
    result = run("speed", "drafts")
    assert (result.exit_code, "SystemExit in line 1: 0" in result.output) == (1, True)


def test_installed_functions_are_called_and_taken_out_again(monkeypatch):
    from nanoinfer.attention import dense, reference

    later = ModuleType("nanoinfer_later")
    monkeypatch.setitem(sys.modules, later.__name__, later)
    task, calls_before = find("causal_attention"), dense.causal_attention
    with installed({task.function: lambda *args: "mine"}) as calls:
        assert reference.causal_attention() == dense.causal_attention() == "mine"
        assert task.function.original is calls_before
        later.causal_attention = dense.causal_attention  # as in a module that is imported now
    assert calls[task.function] == 2
    assert reference.causal_attention is dense.causal_attention is calls_before
    assert later.causal_attention is calls_before


def test_other_folders_and_names_are_refused(run, monkeypatch, tmp_path):
    for arguments in (("check", "argmix"), ("check", "25"), ("check", "0"), ("hint", "argmix"), ("start", ".")):
        result = run(*arguments)
        assert (result.exit_code, "Traceback" in result.output) == (1, False)
    monkeypatch.chdir(tmp_path)
    assert "nanoinfer learn start FOLDER" in run().output


def test_a_saved_file_is_checked_at_once(run, monkeypatch):
    book = Workbook.here(NAMES)

    def save(seconds):
        if book.status("accept_drafts") == "passed":
            raise KeyboardInterrupt
        book.replace_body("accept_drafts", find("accept_drafts").function.source)

    monkeypatch.setattr("nanoinfer_course.cli.time.sleep", save)
    output = run("watch").output
    assert "Next: t01_argmax.py\nSave a file" in output
    assert "accept_drafts: passed\n\n1 of 24 passed. Next: t01_argmax.py" in output


def test_tasks_without_tensors_need_no_torch(tmp_path):
    calls = [["start", "book"], [], *(["hint", name] for name in NAMES), *(["check", name] for name in WITHOUT_TENSORS)]
    code = f"""
import os, sys
from typer.testing import CliRunner
from nanoinfer_course import cli as learn
from nanoinfer.cli.main import app
for arguments in {calls}:
    result = CliRunner().invoke(app, ["learn", *arguments])
    assert result.exit_code == (arguments[:1] == ["check"]), result.output
    if arguments[:1] == ["start"]:
        os.chdir("book")
print([name for name in sys.modules if name in ("torch", "numpy", "transformers")])
"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "[]\n"
    )


def test_the_slow_functions_of_the_speed_tasks_are_right():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 64), (9, 64)))
    torch.testing.assert_close(speed.batch(x, weight), x @ weight.T)
    rounded = quantize(weight, 8)
    torch.testing.assert_close(
        speed.int8_weights(x[:1], rounded.integers, rounded.scales), x[:1] @ weight.T, atol=0.1, rtol=0.1
    )
    work = speed.fused_draw_work(2)
    assert work.call(speed.fused_draw).tolist() == work.engine()[0].tolist()
    q, pages = torch.randn(1, 2, 8, generator=generator), torch.randn(2, 4, 2, 3, 8, generator=generator)
    keys, values = (one[[3, 1]].transpose(1, 2).flatten(0, 1)[:5] for one in pages)
    attended = speed.page_attention(q, *pages, torch.tensor([[3, 1]]), torch.tensor([5]))
    torch.testing.assert_close(attended, causal_attention(q, keys, values))


def test_a_speed_task_passes_if_it_is_right_and_fast(run, monkeypatch):
    shares = {"batch": (0.5, True), "page_attention": (0.1, True), "fused_draw": (0.9, False)}

    def grade(task, version, bandwidth):
        assert version.__code__.co_name == task.name
        share, is_right = shares.get(task.name, (0.9, True))
        return speed.Grade(share, 0.8, is_right)

    monkeypatch.setattr(speed, "grade", grade)
    monkeypatch.setattr("nanoinfer_lab.bench.roofline.measure_bandwidth", lambda device: 2e10)
    result = run("speed")  # code that nobody touched, on a machine where it is fast enough
    assert result.exit_code == 1
    assert (result.output.count("not changed yet"), "passed" in result.output) == (4, False)
    for file in Path().glob("s0*.py"):
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    result = run("speed")
    verdicts = [line.split("speed, ")[1] for line in result.output.splitlines()[1:]]
    assert verdicts == ["passed", "not yet: 0.25 is wanted", "its result is wrong", "passed", "passed"]
    assert result.exit_code == 1
    assert Path("s01_batch.py").read_text().count("def batch(") == 1
    assert run("speed", "s04_int8_weights.py").exit_code == 0
    Path("s01_batch.py").write_text("def batch(:")
    assert "s01_batch           a SyntaxError in line 1" in run("speed", "batch").output


@pytest.mark.slow
def test_the_ladder_measures_the_learners_engine_beside_ours(run, monkeypatch):
    monkeypatch.setattr("nanoinfer_lab.bench.roofline.measure_bandwidth", lambda device: 2e10)
    monkeypatch.setattr(ladder, "WORKLOAD", replace(ladder.WORKLOAD, input_lens=(16,) * 2, output_lens=(4,) * 2))
    assert run("solve", "causal_attention", "--yes").exit_code == run("check", "causal_attention").exit_code == 0
    output = run("ladder").output
    assert [line.split("  ")[0] for line in output.splitlines()] == ["version", "your engine", "the same, ours", "compiled"]
