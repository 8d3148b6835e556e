"""`nanoinfer learn`: a workbook of the engine's functions to write, checked by cases, and run inside the engine.

`nanoinfer learn start FOLDER` writes it. All other commands are for inside the folder. Those that run no model import torch
only for tasks with tensors.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer

from nanoinfer.cli.commands import Command, Commands
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer_course.learn.check import Failure, Task, describe_error, limited
from nanoinfer_course.learn.check import check as compare_cases
from nanoinfer_course.learn.track import GROUPS, NAMES, TRACK, find, named
from nanoinfer_course.learn.workbook import Function, Workbook, filled, installed

app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    invoke_without_command=True,
    help="Write the engine's functions yourself, in a workbook that checks them.",
    epilog="nanoinfer learn start my-engine && cd my-engine\nnanoinfer learn check 1",
)

SECONDS = 20.0  # for all cases of a task together, after which the running case gets a TimeoutError
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task's number, name or file.")]
YOURS: dict[str, Any] = {
    "enforce_eager": True,
    "attention_backend": "reference",
}  # arguments of LLM with which it calls the functions
STATUSES = {"empty": "", "written": "written", "passed": "passed", "missing": "no file"}
THE_END = """\
All {number} passed. It is your engine now:
  nanoinfer learn run "Once upon a time"   generate with it
  nanoinfer learn ladder                   measure it beside the engine itself
  nanoinfer learn speed                    make five functions faster
  nanoinfer bench ladder                   eleven versions of an engine, measured here
  nanoinfer learn export FOLDER            a repository of your own, which runs without nanoinfer"""


class ChildProcessCommand(Command):
    """A command that runs in a child process. Status 0 counts only if the child came to the command's end.

    The workbook's code may exit.
    """

    def invoke(self, ctx: Any) -> object:
        if sys.stdout is not sys.__stdout__ or not hasattr(os, "fork"):  # called by a test, or on Windows
            return super().invoke(ctx)
        read_end, write_end = os.pipe()
        if not (child := os.fork()):
            super().invoke(ctx)
            os.write(write_end, b"!")
            return None
        signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except KeyboardInterrupt:  # a terminal sends it to the child, too, but another program does not
            os.kill(child, signal.SIGTERM)
            raise
        os.write(write_end, b".")  # so that there is something to read
        if status == 0 and os.read(read_end, 1) != b"!":
            raise NanoinferError(
                "the workbook's code ended the process before the command's end; remove calls such as sys.exit"
            )
        raise typer.Exit(status if status >= 0 else 128 - status)


@app.callback()
def learn(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_tasks()


@app.command("list", cls=Command, epilog="nanoinfer learn list")
def list_tasks() -> None:
    """List the tasks of this folder's workbook, and what is done, as `nanoinfer learn` alone does."""
    workbook = Workbook.here(NAMES)
    for group, tasks in groupby(TRACK, key=lambda task: task.group):
        print(GROUPS[group])
        for task in tasks:
            name, status = workbook.file(task.name).stem, STATUSES[workbook.status(task.name)]
            print(f"  {name:<22} {'*' * task.level:<3} {task.minutes:>2} min  {status:<7} {task.title}".rstrip())
    print(f"{_what_next(workbook)}\nnanoinfer learn check TASK, hint TASK, solve TASK, watch, run PROMPT")


@app.command(cls=Command, epilog="nanoinfer learn start my-engine")
def start(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")]) -> None:
    """Write a workbook into a new folder: one file per task."""
    workbook = Workbook(folder, NAMES)
    workbook.write({task.name: task.text for task in TRACK})
    first = workbook.file(NAMES[0]).name
    print(f"{len(TRACK)} tasks in {folder}. README.md there says how to work on them.")
    print(f"Next: cd {folder}, open {first}, and call: nanoinfer learn watch")


@app.command(cls=ChildProcessCommand, epilog="nanoinfer learn check 1")
def check(task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="A task. Default: all of them.")] = None) -> None:
    """Compare your function with the engine's. Exit code 0 only if all that was asked for passes."""
    workbook = Workbook.here(NAMES)
    has_passed = [_check(workbook, each) for each in (TRACK if task is None else [find(task)])]
    if not all(has_passed):
        raise typer.Exit(1)


@app.command(cls=ChildProcessCommand, epilog="nanoinfer learn watch")
def watch() -> None:
    """Check each file when you save it, until you press Ctrl-C."""
    workbook = Workbook.here(NAMES)
    print(f"{_what_next(workbook)}\nSave a file to check it.", flush=True)
    seen = workbook.saved()
    while True:
        time.sleep(0.2)
        before, seen = seen, workbook.saved()
        for task in TRACK:
            if seen.get(task.name) not in (None, before.get(task.name)) and _check(workbook, task):
                print(_what_next(workbook))
        sys.stdout.flush()


@app.command(cls=Command, epilog="nanoinfer learn hint 1")
def hint(task: TaskName) -> None:
    """Show a hint, and another hint at each further call."""
    found = find(task)
    num = Workbook.here(NAMES).next_hint(found.name, len(found.hints))
    for number, text in enumerate(found.hints[:num], 1):
        print(filled(f"{number}. {text}", "   "))
    if num == len(found.hints):
        print("There are no more.")


@app.command(cls=Command, epilog="nanoinfer learn solve 1")
def solve(task: TaskName, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Write the engine's own version into the task's file."""
    found, workbook = find(task), Workbook.here(NAMES)
    file = workbook.file(found.name)
    if not yes:
        typer.confirm(f"Replace the function in {file.name} by the engine's own?", abort=True)
    if not file.exists() or "\ndef " not in file.read_text(encoding="utf-8-sig"):
        file.write_text(found.text, encoding="utf-8")
    workbook.replace_body(found.name, found.function.source)
    print(f"{file.name} has the engine's version.")


@app.command(cls=ChildProcessCommand, epilog='nanoinfer learn run "Once upon a time"')
def run(
    *,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="The longest answer, in tokens.")] = 64,
) -> None:
    """Generate with the bundled model in an engine that calls your passed functions."""
    import torch

    from nanoinfer.llm import LLM

    torch.set_num_threads(1)  # a small model's tensors are small, and threads would mostly wait for each other
    with _your_engine() as calls:
        llm = LLM(**YOURS, kv_cache_memory=2**24)
        params = replace(llm.get_default_sampling_params(), seed=seed, max_tokens=max_tokens)
        [output] = llm.generate(prompt, params, use_tqdm=False)
    print(*map(filled, f"{prompt}{output.outputs[0].text}".split("\n")), sep="\n", end="\n\n")
    yours = [f"{task.name} ({calls[task.function]} calls)" for task in TRACK if calls.get(task.function)]
    print(filled(f"Yours: {', '.join(yours) or 'nothing yet; `nanoinfer learn check` installs what passes'}."))
    if unused := [task.name for task in TRACK if calls.get(task.function) == 0]:
        print(filled(f"Passed, but not needed here: {', '.join(unused)}."))


@app.command(cls=ChildProcessCommand, epilog="nanoinfer learn ladder")
def ladder() -> None:
    """Measure the engine with your passed functions beside the engine itself, on the requests of `bench ladder`."""
    from torch import device

    from nanoinfer.cli.options import busy
    from nanoinfer_lab.bench.ladder import ENGINE, WORKLOAD, engine_rung
    from nanoinfer_lab.bench.roofline import measure_bandwidth

    bandwidth = measure_bandwidth(device("cpu"))
    pages = {**ENGINE["the engine: pages"], "dtype": "float32"}
    versions = {
        "your engine": {**pages, **YOURS},
        "the same, ours": {**pages, **YOURS},
        "compiled": {**pages, "enforce_eager": False},
    }
    print(f"{'version':<16}{'tok/s':>8}{'bandwidth':>11}   of {bandwidth / 1e9:.1f} GB/s")
    for version, arguments in versions.items():
        with _your_engine() if version == "your engine" else nullcontext(), busy(f"Measuring {version}, about a minute"):
            rung = engine_rung(version, None, WORKLOAD, bandwidth, repeats=1, **arguments)
        print(f"{version:<16}{rung.tokens_per_s:>8.1f}{rung.bandwidth_share:>11.1%}", flush=True)


@app.command(cls=ChildProcessCommand, epilog="nanoinfer learn speed 1")
def speed(task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="One of the five. Default: all.")] = None) -> None:
    """Measure five functions that you make faster, beside the engine's own. The first call writes their files."""
    from torch import device

    from nanoinfer.cli.options import busy
    from nanoinfer_course.learn.speed import SPEED, grade
    from nanoinfer_lab.bench.roofline import measure_bandwidth

    workbook = Workbook(Workbook.here(NAMES).folder, [each.name for each in SPEED], "s")
    found = SPEED if task is None else [named(SPEED, task)]
    bandwidth, all_passed = measure_bandwidth(device("cpu")), True
    print(f"Shares of this machine's memory bandwidth, {bandwidth / 1e9:.1f} GB/s:")
    for number, each in enumerate(found, 1):
        file = workbook.file(each.name)
        if not file.exists():
            file.write_text(each.text, encoding="utf-8")
        try:
            version = workbook.load(each.name, each.name)
            is_changed = each.is_changed(file.read_text(encoding="utf-8-sig"))
            with busy(f"Measuring {file.stem}, {number} of {len(found)}, some seconds each"):
                result = grade(each, version, bandwidth)
        except (Exception, SystemExit, GeneratorExit) as error:
            print(f"  {file.stem:<19} {describe_error(error, str(file))}")
            all_passed = False
            continue
        ratio = result.share / result.engine_share
        if not result.is_right:
            verdict = "its result is wrong"
        elif not is_changed:
            verdict = f"not changed yet: {each.wanted:.2f} is wanted"
        elif ratio < each.wanted:
            verdict = f"not yet: {each.wanted:.2f} is wanted"
        else:
            verdict = "passed"
        all_passed = all_passed and verdict == "passed"
        shares = f"yours {result.share:6.1%}, the engine's {result.engine_share:6.1%}"
        print(f"  {file.stem:<19} {shares}: {ratio:.2f} of its speed, {verdict}")
    if not all_passed:
        raise typer.Exit(1)


@contextmanager
def _your_engine() -> Iterator[dict[Function, int]]:
    """Let the engine call the passed functions. Yields how often each was called."""
    workbook = Workbook.here(NAMES)
    passed = [task for task in TRACK if workbook.status(task.name) == "passed"]
    with installed({task.function: workbook.load(task.name, task.function.name) for task in passed}) as calls:
        yield calls


@app.command(cls=Command, epilog="nanoinfer learn export ../my-repository")
def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    *,
    solved: Annotated[bool, typer.Option("--solved", help="Export the engine's own functions. No workbook is needed.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Compare the answers to this many prompts, of each bundled model.")] = 50,
) -> None:
    """Make a repository of your engine: one file that runs without nanoinfer, its tests and what was measured."""
    from nanoinfer.cli.options import busy
    from nanoinfer_course.learn.export import export as write_repository  # imports torch

    files: dict[str, Path] = {}
    if not solved:
        workbook = Workbook.here(NAMES)
        if missing := [task.name for task in TRACK if workbook.status(task.name) != "passed"]:
            raise InvalidValueError(
                f"an export needs {len(TRACK)} passed tasks, and {len(missing)} are not: {', '.join(missing)}; check them by: "
                "nanoinfer learn check, take the engine's version by: nanoinfer learn solve TASK, or use --solved"
            )
        files = {task.name: workbook.file(task.name) for task in TRACK}
    with busy(f"Comparing {4 * prompts} answers, and measuring, which takes a minute or two"):
        report = write_repository(folder, TRACK, files, prompts)
    num_differ = len(report["differ"])
    print(f"{folder}: engine.py has {report['lines']} lines. {num_differ} of {report['answers']} answers differ.")
    for name, failure in report["refused"].items():
        print(f"{name} differs in the one file:\n{indent(failure, '  ')}")
    for each in report["differ"]:
        print(f"differs: {each}")
    for each in report["near_ties"]:
        print(f"near-tie: {each}")
    if report["refused"] or num_differ:
        raise typer.Exit(1)


def _check(workbook: Workbook, task: Task) -> bool:
    """Check a task, print the result and keep it. Returns whether the task has passed."""
    workbook.mark(task.name, passed=False)  # until the check has ended
    failure = _failure(workbook, task)
    workbook.mark(task.name, passed=failure is None)
    print(f"{task.name}: passed" if failure is None else f"{task.name}: not yet\n{indent(str(failure), '  ')}")
    return failure is None


def _failure(workbook: Workbook, task: Task) -> Failure | None:
    file, name = workbook.file(task.name), task.function.name
    try:
        with limited(SECONDS):
            return compare_cases(task, workbook.load(task.name, name))
    except (Exception, SystemExit, GeneratorExit) as error:
        got = describe_error(error, str(file)) if file.exists() else f"no file {file.name}"
        return Failure("the file, before any case", f"a function {name}", got)


def _what_next(workbook: Workbook) -> str:
    """Return how many tasks have passed, and the next of them."""
    left = [task for task in TRACK if workbook.status(task.name) != "passed"]
    if not left:
        return "\n" + THE_END.format(number=len(TRACK))
    return f"\n{len(TRACK) - len(left)} of {len(TRACK)} passed. Next: {workbook.file(left[0].name).name}"
