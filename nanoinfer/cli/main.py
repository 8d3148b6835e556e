"""The `nanoinfer` command. Each subcommand has a file of its own, and options.py holds what they share."""

import io
import logging
import sys
from typing import Annotated

import typer

from nanoinfer import __version__
from nanoinfer.cli.bench import app as bench_app
from nanoinfer.cli.chat import chat
from nanoinfer.cli.explain import explain
from nanoinfer.cli.generate import generate
from nanoinfer.cli.serve import serve

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A small LLM inference engine.", pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine chooses.")] = False,
) -> None:
    if version:
        typer.echo(f"nanoinfer {__version__}")
        raise typer.Exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for a character that the terminal cannot show
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nanoinfer").setLevel(logging.INFO if verbose else logging.WARNING)


def doctor() -> None:
    """Print what this machine has, what the engine will use of it, and whether each attention backend computes correctly."""
    from nanoinfer.cli.doctor import examine, print_report  # imports torch, which takes a second

    report = examine()
    print_report(report)
    if any(check.failed for check in report.checks):
        raise typer.Exit(1)


for command in (generate, explain, doctor, chat, serve):
    app.command()(command)
app.add_typer(bench_app, name="bench")
