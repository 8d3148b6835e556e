"""`nanoinfer learn`: a workbook of the engine's functions to write, checked by cases, and run inside the engine.

`nanoinfer learn start FOLDER` writes it. All other commands are for inside the folder.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from nanoinfer.cli.commands import Command, Commands
from nanoinfer.cli.options import expand_options
from nanoinfer.errors import InvalidValueError
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.lab.learn.check import Failure, Task
    from nanoinfer.lab.learn.workbook import Workbook

app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    invoke_without_command=True,
    help="Write the engine's functions yourself, in a workbook that checks them.",
)

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task's name, as `nanoinfer learn` lists them.")]
STATUSES = {"empty": "", "written": "written, not checked", "passed": "passed", "missing": "its file is missing"}


@app.callback()
def learn(context: typer.Context) -> None:
    """List the tasks of this folder's workbook, and what is done."""
    if context.invoked_subcommand is not None:
        return
    from nanoinfer.lab.learn.track import TRACK  # imports torch, as below

    workbook = _workbook()
    for task in TRACK:
        status = STATUSES[workbook.status(task.name)]
        print(f"{workbook.file(task.name).name:<26}{status:<22}{task.about.split(chr(10))[0]}".rstrip())
    num_passed = sum(workbook.status(task.name) == "passed" for task in TRACK)
    print(f"\n{num_passed} of {len(TRACK)} passed. Next: nanoinfer learn check TASK, or nanoinfer learn hint TASK.")


@app.command(cls=Command)
def start(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")]) -> None:
    """Write a workbook into a new folder: one file per task."""
    from nanoinfer.lab.learn.track import NAMES, TRACK
    from nanoinfer.lab.learn.workbook import Workbook

    Workbook(folder, NAMES).write({task.name: task.text for task in TRACK})
    print(f"{len(TRACK)} tasks in {folder}. Go there, open {TRACK[0].name}'s file, and call `nanoinfer learn`.")


@app.command(cls=Command)
def check(task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="A task. Default: all of them.")] = None) -> None:
    """Compare your function with the engine's. Exit code 0 only if all that was asked for passes."""
    from nanoinfer.lab.learn.track import TRACK, find

    workbook = _workbook()
    tasks = TRACK if task is None else [find(task)]
    num_failed = 0
    for each in tasks:
        failure = _check(workbook, each)
        workbook.mark(each.name, passed=failure is None)
        num_failed += failure is not None
        print(f"{each.name}: passed" if failure is None else f"{each.name}: not yet\n{indent(str(failure), '  ')}")
    if num_failed:
        raise typer.Exit(1)


@app.command(cls=Command)
def hint(task: TaskName) -> None:
    """Show a hint, and another hint at each further call."""
    from nanoinfer.lab.learn.track import find

    found = find(task)
    num = _workbook().next_hint(task, len(found.hints))
    for number, text in enumerate(found.hints[:num], 1):
        print(f"{number}. {' '.join(text.split())}")
    if num == len(found.hints):
        print("There are no more.")


@app.command(cls=Command)
def solve(task: TaskName, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Write the engine's own version into the task's file."""
    from nanoinfer.lab.learn.track import find

    found, workbook = find(task), _workbook()
    if not yes:
        typer.confirm(f"Replace the function in {workbook.file(task).name} by the engine's own?", abort=True)
    workbook.replace_body(task, found.function.source)
    print(f"{workbook.file(task).name} has the engine's version.")


@app.command(cls=Command)
@expand_options
def run(
    *,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    max_tokens: Annotated[int, SamplingParams] = 256,
) -> None:
    """Generate with the bundled model in an engine that calls your passed functions."""
    from nanoinfer.lab.learn.track import TRACK
    from nanoinfer.lab.learn.workbook import installed
    from nanoinfer.llm import LLM

    workbook = _workbook()
    passed = [task for task in TRACK if workbook.status(task.name) == "passed"]
    versions = {task.function: workbook.load(task.name, task.function.name) for task in passed}
    with installed(versions) as calls:
        llm = LLM(enforce_eager=True, attention_backend="reference", kv_cache_memory=2**24)
        params = replace(llm.get_default_sampling_params(), seed=seed, max_tokens=max_tokens)
        [output] = llm.generate(prompt, params, use_tqdm=False)
    print(f"{prompt}{output.outputs[0].text}\n")
    yours = [f"{task.name} ({calls[task.function]} calls)" for task in passed if calls[task.function]]
    print(f"Yours: {', '.join(yours) or 'nothing yet; `nanoinfer learn check` installs what passes'}.")
    if unused := [task.name for task in passed if not calls[task.function]]:
        print(f"Passed, but not needed here: {', '.join(unused)}.")


@app.command(cls=Command)
def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    *,
    solved: Annotated[bool, typer.Option("--solved", help="Export the engine's own functions. No workbook is needed.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Compare the answers to this many prompts, of each bundled model.")] = 50,
) -> None:
    """Make a repository of your engine: one file that runs without nanoinfer, its tests and what was measured."""
    from nanoinfer.lab.learn.export import export as write_repository
    from nanoinfer.lab.learn.track import TRACK

    files: dict[str, Path] = {}
    if not solved:
        workbook = _workbook()
        if missing := [task.name for task in TRACK if workbook.status(task.name) != "passed"]:
            raise InvalidValueError(
                f"an export needs {len(TRACK)} passed tasks, and {len(missing)} are not: {', '.join(missing)}; check them by: "
                "nanoinfer learn check, take the engine's version by: nanoinfer learn solve TASK, or use --solved"
            )
        files = {task.name: workbook.file(task.name) for task in TRACK}
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


def _workbook() -> "Workbook":
    from nanoinfer.lab.learn.track import NAMES
    from nanoinfer.lab.learn.workbook import Workbook

    return Workbook.here(NAMES)


def _check(workbook: "Workbook", task: "Task") -> "Failure | None":
    from nanoinfer.lab.learn.check import SECONDS, Failure, describe_error
    from nanoinfer.lab.learn.check import check as compare_cases

    file, name = workbook.file(task.name), task.function.name
    version: Callable[..., object] | None = None
    try:
        with _limited(SECONDS):
            version = workbook.load(task.name, name)
            return compare_cases(task, version)
    except Exception as error:
        got = describe_error(error, version) if file.exists() else f"no file {file.name}"
        return Failure("the file, before any case", f"a function {name}", got)


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the running code after some seconds, if the system has such a timer."""
    if "SIGALRM" not in signal.Signals.__members__:
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
