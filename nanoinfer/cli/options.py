"""What the commands share: options, the LLM and SamplingParams made from them, standard input, and errors in one sentence.

A command declares a group of options as one keyword, `engine: EngineOptions`, and expand_options turns the group into options.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nanoinfer.errors import InvalidPromptError, InvalidValueError, NanoinferError, UnsupportedError
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM

Model = Annotated[str | None, typer.Option(help="A folder, a hub name, tiny-qwen3 or tiny-gpt2. Default: tiny-qwen3.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of LLM that every command takes, under the same names."""

    model: Model = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    attention_backend: Annotated[str, typer.Option(help="auto, or flash, triton, torch, cpu, reference.")] = "auto"
    kv_cache_memory: Annotated[int | None, typer.Option(help="Bytes for the KV cache.")] = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The fields of SamplingParams that every command takes, under the same names. None means the checkpoint's default."""

    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the checkpoint's, or 1.")] = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 is off.")] = None
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set that reaches this probability; 1 is off.")] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the largest probability; 0 is off."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: make tokens of prompt and output less likely."),
    ] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Above 0: make tokens of the output less likely.")] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Above 0: the same, times the number of times that the token is in the output."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """Variables of the chat template."""

    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer without thinking first: enable_thinking is false.")
    ] = False
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help='Variables of the chat template as JSON, such as {"enable_thinking": false}.')
    ] = None


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass by the fields of the dataclass.

    Typer makes one option of each parameter in `__signature__`. The command itself gets the dataclass, built from its options.

    Args:
        command: has keyword-only parameters. No two of its options have the same name.
    """
    declared = signature(command).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in declared if is_dataclass(one.annotation)}
    options: list[Parameter] = []
    for one in declared:
        options += signature(groups[one.name]).parameters.values() if one.name in groups else [one]

    @wraps(command)
    def with_groups(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    with_groups.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return with_groups


def load_llm(engine: EngineOptions, **more: Any) -> "LLM":
    """Make the LLM. more: other arguments of LLM."""
    from nanoinfer.llm import LLM  # torch takes a second to import, which --help and --version need not wait for

    return LLM(**asdict(engine), **more)


def resolve_sampling_params(llm: "LLM", sampling: SamplingOptions, **more: Any) -> SamplingParams:
    """The checkpoint's defaults, replaced by the options that are not None. more: other fields of SamplingParams."""
    given = {name: value for name, value in (asdict(sampling) | more).items() if value is not None}
    return replace(llm.get_default_sampling_params(), **given)


def resolve_chat_template_kwargs(llm: "LLM", options: ChatTemplateOptions) -> dict[str, Any]:
    """The variables for the chat template. One that the template does not contain is refused: it would have no effect."""
    try:
        given = json.loads(options.chat_template_kwargs or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidValueError(
            f'--chat-template-kwargs must be a JSON object such as {{"enable_thinking": false}}, '
            f"got {options.chat_template_kwargs!r}"
        )
    if options.no_thinking and given.setdefault("enable_thinking", False) is not False:
        raise InvalidValueError("--no-thinking contradicts enable_thinking in --chat-template-kwargs; leave one out")
    for name in given:
        if name not in str(llm.get_tokenizer().chat_template):
            raise UnsupportedError(f"this checkpoint's chat template has no variable {name!r}; leave it out")
    return given


def read_standard_input() -> str:
    """All of standard input, without the newline that ends its last line. Empty where the shell has closed it (`<&-`)."""
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidPromptError(f"standard input is not valid text ({error})") from error


_stderr = Console(stderr=True)


def print_error(error: NanoinferError) -> None:
    """Print one line to standard error, without a traceback."""
    _stderr.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def cli_errors() -> Iterator[None]:
    """Exit with code 1 after an error of nanoinfer, and with 130 after Ctrl-C, as a shell does. Typer's own code is 2."""
    try:
        yield
    except NanoinferError as error:
        print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
