"""docs/coming_from.md names the test that holds each line, and its commands are ours."""

import re
import shlex
from pathlib import Path

import typer

from nanoinfer.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what you ")]


def parsed(arguments):
    """The context of the command that these arguments call, which is not run."""
    root = typer.main.get_command(app)
    context = root.make_context("nanoinfer", list(arguments))
    name, command, rest = root.resolve_command(context, list(arguments))
    return command.make_context(name, rest, parent=context)


def test_every_line_names_a_test_that_exists():
    named = [re.findall(r"`(test_\w+)`", row) for row in ROWS]
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    assert len(named) >= 25
    assert [row for row in named if len(row) != 1 or row[0] not in defined] == []


def test_every_command_of_the_page_is_one_that_the_parser_reads():
    commands = re.findall(r"`nanoinfer ([^`]+)`", PAGE)
    assert len(commands) >= 12
    for command in commands:
        parsed(shlex.split(command))  # raises typer.Exit for what it cannot read


def test_vllms_options_are_ours_or_not_as_the_page_says():
    ours = {option for param in parsed(["serve"]).command.params for option in param.opts}
    rows = [row.split(" | ") for row in ROWS if "test_vllms_options_are" in row]
    same = [option for theirs, here, _ in rows if here.startswith("the same") for option in re.findall(r"`(--[\w-]+)", theirs)]
    other = [option for theirs, here, _ in rows if "the same" not in here for option in re.findall(r"`(--[\w-]+)", theirs)]
    assert len(same) >= 25
    assert len(other) >= 10
    assert [option for option in same if option not in ours] == [option for option in other if option in ours] == []
