"""The `nanoinfer` command. Each subcommand has its own file, and options.py has the shared options."""

import io
import logging
import sys
from importlib import import_module
from typing import Annotated, Any, TextIO

import typer

from nanoinfer import __version__
from nanoinfer.cli.commands import CONTEXT_SETTINGS, Command, Commands, in_words_of, options_in_use

# Each command's module and function, or its Typer, and examples. They are imported when they are called, because the imports of
# all of them take longer than some commands.
COMMANDS = {
    "generate": (
        "nanoinfer.cli.generate:generate",
        """\
nanoinfer generate "Once upon a time" --temperature 0.7 --seed 1
nanoinfer generate --chat -m Qwen/Qwen3-0.6B "What is a KV cache?" --stats""",
    ),
    "chat": (
        "nanoinfer.cli.chat:chat",
        """\
nanoinfer chat -m Qwen/Qwen3-0.6B
git diff | nanoinfer chat "Write a commit message" -m Qwen/Qwen3-0.6B""",
    ),
    "serve": ("nanoinfer.cli.serve:serve", "nanoinfer serve Qwen/Qwen3-0.6B --port 8000"),
    "explain": (
        "nanoinfer_lab.cli.explain:explain",
        """\
nanoinfer explain "Once upon a time" --top-k 5 --seed 1
nanoinfer explain --demo preemption""",
    ),
    "batch": ("nanoinfer.cli.batch:batch", "nanoinfer batch requests.jsonl -o results.jsonl"),
    "models": ("nanoinfer.cli.examine:models", "nanoinfer models"),
    "inspect": ("nanoinfer.cli.examine:inspect", "nanoinfer inspect Qwen/Qwen3-0.6B --users 8 --tokens 4096"),
    "doctor": (
        "nanoinfer.cli.examine:doctor",
        "nanoinfer doctor --json > report.json\nnanoinfer doctor --clear --prefix-cache-dir kv",
    ),
    "verify": (
        "nanoinfer_lab.cli.verify:verify",
        """\
nanoinfer verify -m Qwen/Qwen3-0.6B
nanoinfer verify -m model-q4_0.gguf --against Qwen/Qwen2.5-0.5B-Instruct""",
    ),
    "bench": ("nanoinfer_lab.cli.bench:app", ""),
    "simulate": (
        "nanoinfer_lab.cli.simulate:simulate",
        """\
nanoinfer simulate -m config.json --num-prompts 200 --request-rate 20
nanoinfer bench roofline --json > here.json
nanoinfer simulate --hardware here.json --workload B16""",
    ),
    "check-scheduler": (
        "nanoinfer_lab.cli.check_scheduler:check_scheduler",
        "nanoinfer check-scheduler my_module:MyScheduler --world num_requests=2",
    ),
    "learn": ("nanoinfer_course.cli:app", ""),
}
# The first command of each group -> its heading.
HEADINGS = {"generate": "Generate", "models": "Examine", "bench": "Measure and teach"}


class _Root(Commands):
    """The commands, each of which is imported when it is called."""

    headings = HEADINGS

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            place, examples = COMMANDS[cmd_name]
            module, _, name = place.partition(":")
            found = getattr(import_module(module), name)
            if isinstance(found, typer.Typer):
                command: Any = typer.main.get_group(found)
            else:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(cls=Command, epilog=examples)(found)
                command = typer.main.get_command(alone)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Root,
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A small LLM inference engine.",
    epilog='nanoinfer generate "Once upon a time"',
    pretty_exceptions_enable=False,
)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes warnings in the words of a command line, to the current sys.stderr, which rich replaces while a spinner runs."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return in_words_of(text, options_in_use) if record.levelno >= logging.WARNING else text


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine chooses.")] = False,
) -> None:
    if version:
        typer.echo(f"nanoinfer {__version__}")
        raise typer.Exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for characters that the terminal cannot show
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_StderrHandler()])
    logging.getLogger("nanoinfer").setLevel(logging.INFO if verbose else logging.WARNING)
    if sys.stderr is not None and sys.stderr.isatty():
        logging.getLogger("nanoinfer.fast.cpu.native").setLevel(logging.INFO)  # it logs when kernels are compiled
