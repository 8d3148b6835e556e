"""What the commands share: options, and errors as one sentence instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from nanoinfer.errors import NanoinferError

Model = Annotated[str | None, typer.Option(help="A folder, a hub name, tiny-qwen3 or tiny-gpt2. Default: tiny-qwen3.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]

_errors = Console(stderr=True)


def tell(error: NanoinferError) -> None:
    _errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def cli_errors() -> Iterator[None]:
    """Exit code 1 for what nanoinfer refuses (2 is typer's own, for the command line), 130 after Ctrl-C, as a shell has it."""
    try:
        yield
    except NanoinferError as error:
        tell(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
