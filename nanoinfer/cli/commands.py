"""The common parts of all commands: a short help and a whole one, errors in one line, and values that a shell completes.

The engine's errors name Python arguments. `in_words_of` rewrites them for a user who typed options.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from nanoinfer.errors import NanoinferError, shown, suggest

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
UsageError: Any = typer.BadParameter.__base__  # click's, or that of the copy of click inside typer

# ollama's commands -> what to type.
OF_OLLAMA = {
    "run": "`nanoinfer chat -m MODEL` talks to a model, and `nanoinfer chat -m MODEL QUESTION` answers once",
    "pull": "`hf download OWNER/NAME` downloads a model, as does the first command with -m OWNER/NAME",
    "list": "`nanoinfer models` lists the bundled and the downloaded models",
    "show": "`nanoinfer inspect MODEL` describes a model",
    "ps": "a model is loaded only while a command runs, such as `nanoinfer serve MODEL`",
}

options_in_use: dict[str, str] = {}  # name of an argument -> the option that sets it, of the command that runs


# Of each group of options, those that --help lists, too, each in a sentence. --help-all lists all.
COMMON = {
    "Engine": {"model", "quantization", "device", "max_model_len"},
    "Sampling": {"temperature", "top_k", "top_p", "seed", "max_tokens", "stop"},
    "Chat template": {"no_thinking"},
    "Server": {"served_model_name", "api_key", "max_num_seqs"},
    "Model": {"model", "random_model", "device"},
    "Workload": {"workload", "num_prompts", "input_len", "output_len", "request_rate"},
    "Machine": {"model", "hardware"},
    "Simulated": {"tensor_parallel_size", "max_num_seqs"},
    "Job": {"retry_errors", "seed"},
}


class _Help:
    """A command with --help, which begins with examples, and with --help-all, which has all options and the whole text."""

    help: str | None
    epilog: str | None  # the examples

    def get_params(self, ctx: Any) -> list[Any]:
        *params, short = super().get_params(ctx)  # type: ignore[misc]
        whole = copy(short)
        whole.name, whole.opts, whole.callback = "help_all", ["--help-all"], _show_all
        whole.help, whole.hidden = "Show all options, and explain more.", isinstance(self, TyperGroup)
        return [*params, short, whole]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        text = inspect.cleandoc(self.help or "")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text if _is_whole(ctx) else text.partition("\n\n")[0])
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: the examples stand above the options."""


def _is_whole(ctx: Any) -> bool:
    return bool(ctx.meta.get(__name__))


def _show_all(ctx: Any, param: object, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[__name__] = True  # _is_whole reads it
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class Command(_Help, TyperCommand):
    """A command whose help has its own options first, and whose errors name options."""

    def invoke(self, ctx: Any) -> object:
        options_in_use.clear()
        options_in_use.update((param.name, max(param.opts, key=len)) for param in self.params if isinstance(param, TyperOption))
        with cli_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            more = re.search(r"unexpected extra argument\S* \((.*)\)", error.format_message())
            text = next((param for param in self.params if param.metavar in ("PROMPT", "QUESTION")), None)
            if more and text is not None:
                ctx.fail(f'put the {str(text.metavar).lower()} in quotes: "{ctx.params[str(text.name)]} {more[1]}"')
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the command's own options, and then the common ones or, with --help-all, a section for each group."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Common options": []}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            if heading not in sections and not _is_whole(ctx):
                if param.name not in COMMON.get(heading, ()):
                    continue
                heading = "Common options"
            if record := param.get_help_record(ctx):
                names, text = (param.metavar or str(param.name).upper()) if is_argument else record[0], record[1]
                if heading == "Common options" and len(text) > 50:
                    text = re.sub(r"(?<=\.) .*?(?=  \[|$)", "", text, count=1)
                sections.setdefault(heading, []).append((names, text))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=36)


class Commands(_Help, TyperGroup):
    """Commands, whose errors are printed as one line."""

    headings: Mapping[str, str] = {}  # a command -> the heading above it and those that follow, in the help

    def make_context(self, *args: Any, **more: Any) -> Any:
        with cli_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> object:
        with cli_errors():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            hint = (ctx.parent is None and OF_OLLAMA.get(args[0])) or suggest(args[0], self.list_commands(ctx))
            ctx.fail(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the first sentence of their help, which click would cut at the end of a line."""
        sections: dict[str, list[tuple[str, str]]] = {}
        heading = "Commands"
        for name in self.list_commands(ctx):
            heading = self.headings.get(name, heading)
            if command := self.get_command(ctx, name):
                sections.setdefault(heading, []).append((name, command.get_short_help_str(limit=1000)))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def complete_from(*values: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option whose usual values are known."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def complete_models(incomplete: str) -> list[str]:
    """Complete a model's name: bundled, or in the hub's cache. The shell completes paths."""
    from nanoinfer.loading.folders import bundled_models

    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    cached = sorted(path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*"))
    return complete_from(*bundled_models(), *cached)(incomplete)


def in_words_of(message: str, options: Mapping[str, str]) -> str:
    """Return a Python error in the words of a command line. options: name of an argument -> the option that sets it.

    >>> in_words_of("max_tokens must be >= 1, or None for the model's length, got 0", {"max_tokens": "--max-tokens"})
    '--max-tokens must be >= 1, got 0'
    """
    message, *quoted = re.split(r"(?<= answered )(?=\d{3}: )", message, maxsplit=1)  # a server's own words stay as they are
    for name, option in options.items():
        message = re.sub(rf"\b{name}='([^']*)'", rf"{option}=\1", message)
        message = re.sub(rf"(\A|; leave ){name}(?= (?:must|out)\b|: )", rf"\1{option}", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w./'-]){name}(?![\w.('=])", option, message)
    message = re.sub(r" or None(?= or )|,? or None(?: for [^,;]*| to [^,;]*)?(?=[,;]|$)", "", message)
    return "".join((message.replace(" must be None, ", " must be "), *quoted))


def print_error(error: NanoinferError | str) -> None:
    """Print a line to standard error, without a traceback."""
    from rich.console import Console  # takes a while, and most commands end without an error

    Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def cli_errors() -> Iterator[None]:
    """Exit without a traceback: with code 2 if the command line cannot be read, 130 after Ctrl-C, and 1 after any other error.

    Other errors are those of nanoinfer and of the system, such as a full disk. After a closed pipe nothing is printed.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # so that an error of the buffered output is an error of the command
    except NanoinferError as error:
        print_error(in_words_of(str(error), options_in_use))
        raise typer.Exit(1) from None
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # `nanoinfer` alone, for which click prints the help
            raise
        message = error.format_message().rstrip(".")
        if of_pydantic := getattr(error.__cause__, "errors", None):  # newer versions of typer leave the value out
            message += f", got {shown(of_pydantic()[0]['input'])}"
        is_helpful = error.ctx is None or message.endswith("?")
        print_error(message if is_helpful else f"{message}; {error.ctx.command_path} --help-all lists what there is")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            name = error.filename or "the output cannot be written"
            print_error(f"{name}: {error.strerror or error}")
        try:  # otherwise Python writes the buffered output at its end, with a second error
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
