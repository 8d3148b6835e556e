"""`nanoinfer`: generate, chat, explain and measure from a terminal. A thin layer over LLM, whose names the options have."""

import io
import logging
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nanoinfer import __version__
from nanoinfer.cli.bench import app as bench_app
from nanoinfer.cli.explain import token_table
from nanoinfer.cli.options import Device, Dtype, Model, cli_errors, tell
from nanoinfer.errors import InvalidPromptError, InvalidValueError, NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.tracing import Recorder, TokenAppended

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="A small LLM inference engine.", pretty_exceptions_enable=False
)
app.add_typer(bench_app, name="bench")

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
AttentionBackend = Annotated[str, typer.Option(help="auto, or flash, triton, torch, cpu, reference.")]
KVCacheMemory = Annotated[int | None, typer.Option(help="Bytes for the KV cache.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: the checkpoint's, or 1.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set that reaches this probability; 1 is off.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the largest probability; 0 is off.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: make tokens of prompt and output less likely.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Above 0: make tokens of the output less likely.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same, for each time that a token is in the output.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
MinTokens = Annotated[int, typer.Option(help="Tokens before the text may end.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
StopTokenIds = Annotated[list[int] | None, typer.Option(help="End at this token id; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option(help="Do not end at the end-of-text token.")]

# The options that go to LLM; those that SamplingParams knows go there (a seed is a request's).
_OF_THE_ENGINE = (
    "model", "revision", "dtype", "device", "attention_backend", "kv_cache_memory", "max_model_len", "block_size",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell what the engine chooses.")] = False,
) -> None:
    if version:
        typer.echo(f"nanoinfer {__version__}")
        raise typer.Exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no emoji shows "?" instead of ending the program
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nanoinfer").setLevel(logging.INFO if verbose else logging.WARNING)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    kv_cache_memory: KVCacheMemory = None,
    max_model_len: MaxModelLen = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    max_tokens: MaxTokens = 256,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_ids: StopTokenIds = None,
    ignore_eos: IgnoreEos = False,
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt, too.")] = False,
) -> None:
    """Continue a text, and show it as it comes."""
    given = dict(locals())
    with cli_errors():
        llm = _load(given)
        params = _params(llm, given)
        text = _standard_input() if prompt == "-" else prompt
        if echo:
            print(text, end="", flush=True)
        _, interrupted = _show(llm, text, params)
        if interrupted:
            raise typer.Exit(130)  # as a shell has it


@app.command()
def explain(
    prompts: Annotated[
        list[str], typer.Argument(help="The texts to continue, together; - reads standard input.", metavar="PROMPT...")
    ],
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    kv_cache_memory: KVCacheMemory = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block of the KV cache; small ones show more.")] = 16,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    max_tokens: MaxTokens = 32,
    stop: Stop = None,
    html: Annotated[Path, typer.Option(help="Where the page goes that replays it.")] = Path("trace.html"),
    jsonl: Annotated[Path | None, typer.Option(help="Keep the events, too, a line of JSON each.")] = None,
) -> None:
    """Show how each token came about: a table here, and a page that replays the whole generation."""
    given = dict(locals())
    with cli_errors():
        if html == jsonl:
            raise InvalidValueError(f"--html and --jsonl must be two files, got {html} for both; name another")
        for path in (html, jsonl):
            if path is not None and not path.absolute().parent.is_dir():
                raise InvalidValueError(f"cannot write {path}: there is no such folder; name another place")
        recorder = Recorder(stages=True)
        llm = _load(given, tracer=recorder)
        params = _params(llm, given)
        outputs = llm.generate([_standard_input() if text == "-" else text for text in prompts], params, use_tqdm=False)
        errors = {index: output.outputs[0].error for index, output in enumerate(outputs) if output.outputs[0].error}
        for index, error in errors.items():
            tell(NanoinferError(f"prompt {index}: {error}"))
        if recorder.of(TokenAppended):
            Console().print(token_table(recorder))
            _write(recorder.to_html, html, "replays it in a browser, from the disk")
        if jsonl:
            _write(recorder.to_jsonl, jsonl, "has the events; Recorder.from_jsonl reads them")
        if errors:
            raise typer.Exit(1)


def _write(write: Callable[[Path], None], path: Path, what: str) -> None:
    try:
        write(path)
    except OSError as error:
        raise NanoinferError(f"cannot write {path} ({error.strerror}); name another place") from error
    print(f"{path} {what}")


@app.command()
def doctor() -> None:
    """What this machine has, what the engine will use of it, and whether each attention backend computes rightly here."""
    from nanoinfer.cli.doctor import examine
    from nanoinfer.devices.machine_checks import cache_path

    report = examine()
    console = Console()
    tables = {
        "this machine": report.machine,
        "what the engine will use": report.engine,
        f"measured before, kept in {cache_path()}": report.verdicts,
    }
    for title, pairs in tables.items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for pair in pairs:
            table.add_row(*pair)
        console.print(table)
    table = Table("", "", title="attention backends, beside the reference", title_justify="left", show_header=False)
    for check in report.checks:
        table.add_row(check.backend, check.words)
    console.print(table)
    if any(check.failed for check in report.checks):
        raise typer.Exit(1)


@app.command()
def chat(
    model: Model = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attention_backend: AttentionBackend = "auto",
    kv_cache_memory: KVCacheMemory = None,
    max_model_len: MaxModelLen = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    max_tokens: MaxTokens = 1024,
    stop: Stop = None,
) -> None:
    """Talk to a model that has a chat template. Ctrl-C stops an answer; /reset forgets, /exit or Ctrl-D leaves."""
    given = dict(locals())
    with cli_errors():
        llm = _load(given)
        params = _params(llm, given)
        beginning = [{"role": "system", "content": system}] if system else []
        messages = list(beginning)
        while (line := _ask()) is not None and line != "/exit":
            if line == "/reset":
                messages = list(beginning)
                print("(forgotten)")
            elif line:
                question = {"role": "user", "content": line}
                try:
                    answer, _ = _show(llm, llm.render_chat([*messages, question]), params)
                except NanoinferError as error:  # too long, say: the conversation stays as it was
                    tell(error)
                    continue
                if answer:
                    messages += [question, {"role": "assistant", "content": answer}]


def _ask() -> str | None:
    """One line from the user; None at the end of the input. Ctrl-C at the prompt only clears the line."""
    while True:
        try:
            return input("\n> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _show(llm: Any, prompt: Any, params: Any) -> tuple[str, bool]:
    """Stream an answer to the terminal. Returns what came, and whether Ctrl-C cut it short."""
    shown, interrupted = "", False
    stream = llm.stream(prompt, params)
    try:
        for delta in stream:
            shown += delta.text
            print(delta.text, end="", flush=True)
            if delta.output and (error := delta.output.outputs[0].error):
                raise NanoinferError(error)
    except KeyboardInterrupt:
        interrupted = True
        stream.close()
    print()
    return shown, interrupted


def _standard_input() -> str:
    """All of it, less the newline that ends its last line."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidPromptError(f"standard input is not valid text ({error})") from error


def _load(given: dict[str, Any], **more: Any) -> Any:
    """given: a command's options by name, of which it takes those that LLM has under the same name."""
    from nanoinfer.llm import LLM  # torch takes a second to import: not before --help and --version have had their chance

    return LLM(**{name: given[name] for name in _OF_THE_ENGINE if name in given}, **more)


def _params(llm: Any, given: dict[str, Any]) -> Any:
    """The checkpoint's own defaults, with what was given on the command line in their place."""
    names = [field.name for field in fields(SamplingParams) if given.get(field.name) is not None]
    return replace(llm.get_default_sampling_params(), **{name: given[name] for name in names})
