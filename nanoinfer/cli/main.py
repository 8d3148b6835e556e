"""The `nanoinfer` command. Each subcommand has a file of its own, and options.py has what they share."""

import io
import json
import logging
import sys
from dataclasses import asdict
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from nanoinfer import __version__
from nanoinfer.cli.batch import batch
from nanoinfer.cli.bench import app as bench_app
from nanoinfer.cli.chat import chat
from nanoinfer.cli.explain import explain
from nanoinfer.cli.generate import generate
from nanoinfer.cli.learn import app as learn_app
from nanoinfer.cli.options import Dtype, cli_errors
from nanoinfer.cli.serve import serve


class Commands(TyperGroup):
    """The commands, whose errors are printed as one line."""

    def invoke(self, ctx: Any) -> Any:
        with cli_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A small LLM inference engine.",
    pretty_exceptions_enable=False,
)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which rich replaces while a spinner turns, to print above the spinner."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


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
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_StderrHandler()])
    logging.getLogger("nanoinfer").setLevel(logging.INFO if verbose else logging.WARNING)


def doctor(
    model: Annotated[
        str | None, typer.Option(help="also report what is compiled of this folder, hub name or bundled model")
    ] = None,
) -> None:
    """Print what this machine has, and check each attention backend."""
    from nanoinfer.cli.doctor import examine, examine_model, print_report  # imports torch, which takes a second

    report = examine()
    print_report(report, None if model is None else examine_model(model))
    if any(check.failed for check in report.checks):
        raise typer.Exit(1)


def models() -> None:
    """List the bundled models and those in the Hugging Face cache."""
    from nanoinfer.cli.inspect import installed_models, print_models  # imports torch

    print_models(installed_models())


def inspect(
    model: Annotated[str | None, typer.Argument(help="A folder, a .gguf file, a hub name or a bundled model.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    dtype: Dtype = "auto",
    users: Annotated[int, typer.Option(min=1, help="Sequences at a time, for the memory they take.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each. Default: the model's maximum.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a checkpoint is, whether it can be loaded, and its memory."""
    from nanoinfer.cli.inspect import examine, print_inspection  # imports torch

    found = examine(model, revision, dtype=dtype, num_users=users, num_tokens=tokens)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print_inspection(found)
    if found.unsupported_reason is not None:
        raise typer.Exit(1)


for command in (generate, chat, explain, serve, batch, models, inspect, doctor):
    app.command()(command)
app.add_typer(bench_app, name="bench")
app.add_typer(learn_app, name="learn")
