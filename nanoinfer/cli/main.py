"""The `nanoinfer` command. Each subcommand has its own file, and options.py has the shared options."""

import io
import logging
import sys
from functools import partial
from typing import Annotated, TextIO

import typer

from nanoinfer import __version__
from nanoinfer.cli.batch import batch
from nanoinfer.cli.bench import app as bench_app
from nanoinfer.cli.chat import chat
from nanoinfer.cli.check_scheduler import check_scheduler
from nanoinfer.cli.commands import CONTEXT_SETTINGS, Command, Commands, complete_models, in_words_of, options_in_use
from nanoinfer.cli.explain import explain
from nanoinfer.cli.generate import generate
from nanoinfer.cli.learn import app as learn_app
from nanoinfer.cli.options import AsJson, Model, busy, expand_options, print_result
from nanoinfer.cli.serve import serve
from nanoinfer.cli.simulate import simulate
from nanoinfer.config import EngineArgs

app = typer.Typer(
    cls=Commands,
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A small LLM inference engine.",
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


@expand_options
def doctor(
    *,
    model: Model = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List each attention backend, and what is compiled of the model.")
    ] = False,
    bits: Annotated[
        bool,
        typer.Option("--bits", help="Compare tokens and log-probabilities in float32 with the published ones."),
    ] = False,
    prefix_cache_dir: Annotated[str | None, EngineArgs] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Only remove the kernels, packed weights and prefixes that are kept on disk.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a bug report needs: this machine, and what the engine will use on it. Check each attention backend."""
    if clear:
        from nanoinfer.cli.doctor import print_removed, remove_kept  # imports torch, which takes a second

        return print_result(remove_kept(prefix_cache_dir), as_json, print_removed)
    with busy("Examining this machine"):
        from nanoinfer.cli.doctor import examine, print_report  # imports torch, which takes a second

        with_model = kernels or model is not None
        report = examine(model, with_model=with_model, with_bits=bits, prefix_cache_dir=prefix_cache_dir)
    print_result(report, as_json, partial(print_report, with_kernels=kernels))
    if any(check.failed for check in report.checks) or report.has_other_bits:
        raise typer.Exit(1)


@expand_options
def models(*, as_json: AsJson = False) -> None:
    """List the bundled models and those in the Hugging Face cache."""
    with busy("Reading the models' headers"):
        from nanoinfer.cli.inspect import installed_models, print_models  # imports torch

        found = installed_models()
    print_result(found, as_json, print_models)


@expand_options
def inspect(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A folder, a .gguf file, a hub name or a bundled model.", autocompletion=complete_models
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    dtype: Annotated[str, EngineArgs] = "auto",
    users: Annotated[int, typer.Option(min=1, help="Sequences at a time, for the memory they take.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each. Default: the model's maximum.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a checkpoint is, whether it can be loaded, and its memory."""
    from nanoinfer.cli.inspect import examine, print_inspection  # imports torch

    found = examine(model, revision, dtype=dtype, num_users=users, num_tokens=tokens)
    print_result(found, as_json, print_inspection)
    if found.unsupported_reason is not None:
        raise typer.Exit(1)


@expand_options
def verify(
    *,
    model: Model = None,
    revision: Annotated[str | None, EngineArgs] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The checkpoint that transformers reads. Default: the model's own. A quantised model or a GGUF file needs it.",
            autocompletion=complete_models,
        ),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(help="Some of float32, bfloat16, float16, int8, int4, with commas. Default: all but float16."),
    ] = None,
    device: Annotated[str, EngineArgs] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare a model, as it runs on this machine, with transformers: greedy tokens, log-probabilities, perplexity."""
    with busy("Starting"):
        from nanoinfer.cli.verify import examine, print_report  # imports torch

    report = examine(model, revision, against=against, variants=variants, device=device)
    print_result(report, as_json, print_report)
    if report.has_failed:
        raise typer.Exit(1)


EXAMPLES = {
    generate: """\
nanoinfer generate "Once upon a time" --temperature 0.7 --seed 1
nanoinfer generate --chat -m Qwen/Qwen3-0.6B "What is a KV cache?" --stats""",
    chat: """\
nanoinfer chat -m Qwen/Qwen3-0.6B
git diff | nanoinfer chat "Write a commit message" --url http://127.0.0.1:8000""",
    explain: """\
nanoinfer explain "Once upon a time" --top-k 5 --seed 1
nanoinfer explain --demo preemption""",
    serve: "nanoinfer serve Qwen/Qwen3-0.6B --port 8000",
    batch: "nanoinfer batch requests.jsonl -o results.jsonl",
    models: "nanoinfer models",
    inspect: "nanoinfer inspect Qwen/Qwen3-0.6B --users 8 --tokens 4096",
    check_scheduler: "nanoinfer check-scheduler my_module:MyScheduler --world num_requests=2",
    simulate: """\
nanoinfer simulate -m config.json --hardware H100 --num-prompts 200 --request-rate 20 --input-len 500 --output-len 100
nanoinfer bench roofline --json > here.json; nanoinfer simulate --hardware here.json --workload B16""",
    doctor: "nanoinfer doctor --json > report.json\nnanoinfer doctor --clear --prefix-cache-dir kv",
    verify: """\
nanoinfer verify -m Qwen/Qwen3-0.6B
nanoinfer verify -m qwen2.5-0.5b-instruct-q4_0.gguf --against Qwen/Qwen2.5-0.5B-Instruct --variants bfloat16,int4""",
}

for command, examples in EXAMPLES.items():
    app.command(cls=Command, epilog=examples)(command)
app.add_typer(bench_app, name="bench")
app.add_typer(learn_app, name="learn")
