"""Benchmarks for the people who work on nanoinfer, run from a clone and not part of the package. README.md lists them."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from nanoinfer.cli.commands import CONTEXT_SETTINGS, Command
from nanoinfer.cli.options import expand_options


def program(main: Callable[..., None]) -> typer.Typer:
    """Make a command of a function, with the option groups and the one-sentence errors of `nanoinfer`."""

    @wraps(main)
    def run(**options: Any) -> None:
        if sys.stderr.isatty():
            print("measuring, which takes a while", file=sys.stderr)
        main(**options)

    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
    app.command(cls=Command, context_settings=CONTEXT_SETTINGS)(expand_options(run))
    return app
