"""How the commands tell errors: one sentence instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from nanoinfer.errors import NanoinferError

_errors = Console(stderr=True)


def tell(error: NanoinferError) -> None:
    _errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Exit code 1 for what nanoinfer refuses (2 is typer's own, for the command line)."""
    try:
        yield
    except NanoinferError as error:
        tell(error)
        raise typer.Exit(1) from None
