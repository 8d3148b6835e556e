"""Groups of options: a command declares a dataclass, the terminal shows its fields, and the command gets the dataclass."""

import subprocess
import sys
from dataclasses import dataclass, fields
from inspect import signature

import pytest
import typer
from typer.testing import CliRunner

from nanoinfer import LLM, SamplingParams
from nanoinfer.cli.options import EngineOptions, SamplingOptions, expand_options


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int = 1
    y: int = 2


def run(*arguments):
    """What a command with a Point between two options of its own receives."""
    received = []

    @expand_options
    def command(*, name: str = "a", point: Point, z: int = 3) -> None:
        received.append((name, point, z))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return received or result.output


def test_a_command_gets_its_group_from_the_options_of_its_fields():
    assert run() == [("a", Point(), 3)]
    assert run("--y", "5", "--name", "b", "--z", "7") == [("b", Point(x=1, y=5), 7)]


def test_the_options_are_in_the_order_of_the_declaration():
    text = run("--help")
    places = [text.index(option) for option in ("--name", "--x", "--y", "--z")]
    assert places == sorted(places)


def test_the_groups_have_the_names_of_what_they_are_passed_to():
    assert names(EngineOptions) <= set(signature(LLM.__init__).parameters)
    assert names(SamplingOptions) <= names(SamplingParams)


def names(kind):
    return {field.name for field in fields(kind)}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"], ["bench", "throughput", "--help"]])
def test_help_and_version_import_no_torch(arguments):
    code = f"import sys; from nanoinfer.cli.main import app; app({arguments}, standalone_mode=False); print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "nanoinfer.cli.doctor" not in imported
    assert not {"torch", "transformers", "numpy"} & set(imported)
