"""Shared by all commands: options, the LLM and SamplingParams made from them, text from files, and tables.

A command declares a group of options as one keyword, `engine: EngineOptions`, and expand_options turns the group into options.
"""

import io
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import copy
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo

from nanoinfer.arguments import Bytes, Option, declarations, size_in_bytes
from nanoinfer.cli.commands import complete_from, complete_models, in_words_of
from nanoinfer.config import EngineArgs
from nanoinfer.errors import CheckpointNotFoundError, InvalidPromptError, InvalidValueError, NanoinferError, UnsupportedError
from nanoinfer.sampling_params import SamplingParams, over_default
from nanoinfer.system.installation import install_command

if TYPE_CHECKING:
    from nanoinfer.llm import LLM
    from nanoinfer.server.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

L = TypeVar("L", "LLM", "AsyncLLM")
R = TypeVar("R")


def parse_size(text: str | int) -> int:
    """Read the number of bytes of an option, or its default."""
    try:
        return size_in_bytes(str(text))
    except InvalidValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_adapter(text: str) -> tuple[str, float]:
    """Read a LoRA adapter's folder and its strength.

    >>> parse_adapter("adapters/pirate"), parse_adapter("adapters/pirate=0.5")
    (('adapters/pirate', 1.0), ('adapters/pirate', 0.5))
    """
    matched = re.fullmatch(r"(.+)=(-?\d+(?:\.\d+)?)", text)
    return (matched[1], float(matched[2])) if matched else (text, 1.0)


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A folder, a .gguf file, a hub name, tiny-qwen3 (the default), tiny-gpt2 or tiny-tools.",
        autocompletion=complete_models,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import a module of your own, installed or in the current folder, that registers models or backends. May be given "
        "several times.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of LLM that every command takes, under the same names, and the number of torch's threads.

    Annotated[type, C]: the option has the help of the argument of the same name that class C declares.
    """

    model: Model = None
    revision: Annotated[str | None, EngineArgs] = None
    tokenizer: Annotated[str | None, EngineArgs] = None
    dtype: Annotated[str, EngineArgs] = "auto"
    quantization: Annotated[str | None, EngineArgs] = None
    calibration: Annotated[str | None, EngineArgs] = None
    screened_head: Annotated[bool, EngineArgs] = True
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="A LoRA adapter's folder, merged into the weights. May be given several times, with strengths: PATH=0.5."
        ),
    ] = None
    device: Annotated[str, EngineArgs] = "auto"
    tensor_parallel_size: Annotated[int, EngineArgs] = 1
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute on a CPU, in all processes. Default: torch's choice.")
    ] = None
    enforce_eager: Annotated[bool, EngineArgs] = False
    cudagraph_capture: Annotated[str, EngineArgs] = "load"
    max_model_len: Annotated[int | None, EngineArgs] = None
    attention_backend: Annotated[str, EngineArgs] = "auto"
    kv_cache_memory: Annotated[int | None, EngineArgs] = None
    prefix_cache_dir: Annotated[str | None, EngineArgs] = None
    prefix_cache_size: Annotated[int, EngineArgs] = EngineArgs.prefix_cache_size
    scheduling_policy: Annotated[str, EngineArgs] = "fcfs"
    scheduler_cls: Annotated[str | None, EngineArgs] = None
    block_manager_cls: Annotated[str | None, EngineArgs] = None
    kv_cache_dtype: Annotated[str, EngineArgs] = "auto"
    speculative_config: Annotated[str | None, EngineArgs] = None
    stages: Annotated[str | None, EngineArgs] = None
    logits_processors: Annotated[list[str] | None, EngineArgs] = None
    imports: Imports = None


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """The arguments of LLM for commands that run many requests at a time."""

    max_num_seqs: Annotated[int, EngineArgs] = 256
    max_num_batched_tokens: Annotated[int, EngineArgs] = 4096
    enable_prefix_caching: Annotated[bool, EngineArgs] = True
    batch_invariant: Annotated[bool, EngineArgs] = False
    enable_lora: Annotated[bool, EngineArgs] = False
    max_loras: Annotated[int, EngineArgs] = 1
    max_lora_rank: Annotated[int, EngineArgs] = 16


# The parameters of SamplingParams with an Option, by name, where None is the checkpoint's default.
SamplingOptions = Annotated[dict[str, Any], SamplingParams]


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
    """Replace each parameter whose type is a dataclass by the fields of the dataclass, and SamplingOptions by its parameters.

    Typer makes one option of each parameter in `__signature__`, and the command gets the dataclass, or the dict, that is built
    from them. The parameters of the command are keyword-only, and no two options have the same name: an option of the command
    itself replaces a parameter of SamplingOptions. The name of a group, without "Options", is a heading in the command's help.
    """
    declared = signature(command).parameters
    groups: dict[str, Any] = {}
    options: list[Parameter] = []
    for name, one in declared.items():
        members, owner, group = [one], None, one.annotation
        if is_dataclass(group):
            members, owner = list(signature(group).parameters.values()), group  # type: ignore[arg-type]
            groups[name] = group, [member.name for member in members]
        elif group == SamplingOptions:
            names = [each for each in option_names(SamplingParams) if each not in declared]
            kinds = {each: Annotated[declarations(SamplingParams)[each].text_type | None, SamplingParams] for each in names}
            members = [Parameter(each, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for each, kind in kinds.items()]
            groups[name] = dict, names
        options += [_described(member, owner) for member in members]

    @wraps(command)
    def with_groups(**given: object) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{name: given.pop(name) for name in names})
        command(**given)

    with_groups.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return with_groups


def option_names(owner: type) -> list[str]:
    """Return the parameters with an Option that a text can give."""
    return [name for name, one in declarations(owner).items() if one.marker(Option) and one.text_type is not dict]


def print_result(result: R, as_json: bool, print_tables: Callable[[R], None]) -> None:
    """Print a result, of dataclasses, paths and of what JSON has, as JSON or by print_tables."""
    if as_json:
        print(json.dumps(result, indent=1, default=lambda value: str(value) if isinstance(value, Path) else asdict(value)))
    else:
        print_tables(result)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], **style: Any) -> None:
    """Print a table for 80 columns, without spaces at the ends of lines. Long cells are wrapped but in the first column."""
    print("\n".join(table_lines(headings, rows, **style)))


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], **style: Any) -> list[str]:
    """Return the lines of print_table.

    Args:
        headings: the text above each column. If all are empty, there is no line of headings.
        rows: the cells of each row. A row without cells is an empty line.
        style: further arguments of rich's Table.
    """
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, show_header=any(headings), **style
    )
    for heading in headings:
        width, is_first = max(map(len, heading.split()), default=None), not table.columns  # so that names can be copied
        table.add_column(heading, overflow="fold", min_width=width, no_wrap=is_first)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if console.is_dumb_terminal:  # for which rich assumes 80 columns
        console = Console(width=get_terminal_size().columns, height=get_terminal_size().lines)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


METAVARS = {int: "N", float: "NUMBER", str: "TEXT", dict: "JSON", Path: "FILE"}


def _described(option: Parameter, owner: Any) -> Parameter:
    """Return an option with its help, a short word for its value and a heading in the help, unless it has its own.

    owner: the class of the option's group, which declares the option unless its annotation names another class. None: no group.
    """
    kind, *more = get_args(option.annotation) if get_origin(option.annotation) is Annotated else (None,)
    if not more or isinstance(more[0], ArgumentInfo):
        return option
    if isinstance(more[0], OptionInfo):
        info = copy(more[0])
    elif isinstance(more[0], type):
        info = _declared_option(option, more[0])
    else:
        kind, info = declarations(owner)[option.name].text_type | None, _declared_option(option, owner)
    of_value = kind
    while of_value not in METAVARS and get_args(of_value):  # int | None, list[str] | None
        of_value = get_args(of_value)[0]
    info.metavar = info.metavar or METAVARS.get(of_value)
    if owner is not None and info.rich_help_panel is None:
        info.rich_help_panel = re.sub("(?!^)[A-Z]", r" \g<0>", owner.__name__.removesuffix("Options")).capitalize()
    return option.replace(annotation=Annotated[kind, info])


def _declared_option(option: Parameter, owner: type) -> OptionInfo:
    """Make an option of what a class declares under its name. A shell completes the words that the help has in quotes."""
    declared = declarations(owner)[option.name]
    marker, words = declared.marker(Option), re.findall(r'"([\w:]+)"', declared.sentences[0])
    names = [f"--{option.name.replace('_', '-')}"]
    if declared.kind is bool and declared.default is not False:
        names[0] += f"/--no-{names[0][2:]}"
    names += [marker.short_name] if marker and marker.short_name else []
    is_list = declared.text_type is not None and get_origin(declared.text_type) is list
    is_size = declared.marker(Bytes) is not None
    more = " May be given several times, with one value each." if is_list else " Also as 512M or 1.5G." if is_size else ""
    info: OptionInfo = typer.Option(
        *names,
        help=in_words_of(declared.sentences[0].removesuffix("."), {}) + f".{more}",
        autocompletion=complete_from(*words) if words else None,
        rich_help_panel="Sampling" if owner is SamplingParams else None,
        parser=parse_size if is_size else None,
        metavar="SIZE" if is_size else "JSON" if declared.text_type is dict else None,
    )
    return info


class _StatusFile:
    """Standard error while a status is shown: a progress bar, which begins with a carriage return, takes the status's place."""

    def __init__(self, status: Status) -> None:
        self._status, self._text, self._file = status, status.status, sys.stderr

    def write(self, text: str) -> int:
        if not text.startswith("\r"):
            return self._file.write(text)
        self._status.update(Text(text.strip()[: self._status.console.width - 2]) or self._text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on a terminal, in one line, that something takes a while, and the progress bars of what runs inside."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(what)) as status, redirect_stderr(_StatusFile(status)):
        yield


def check_chat_template(engine: EngineOptions) -> None:
    """Refuse a model without a chat template before its weights are downloaded and loaded.

    Only small files are read, and the beginning of a GGUF file. Making the tokenizer twice would take a second.
    """
    from nanoinfer.features.formats.gguf import MAX_METADATA_BYTES
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL, check_file, locate

    name, revision = (engine.tokenizer, None) if engine.tokenizer else (engine.model or DEFAULT_MODEL, engine.revision)
    path = locate(name, revision, with_weights=False)
    files = [path] if path.is_file() else [*path.glob("tokenizer_config.json"), *path.glob("*.gguf")]
    if any(path.glob("*chat_template*")):
        return
    for file in files:
        check_file(file)
        with file.open("rb") as content:
            if b"chat_template" in content.read(MAX_METADATA_BYTES):
                return
    hint = "continue a text with `nanoinfer generate`, or name a tokenizer that has one with --tokenizer"
    raise UnsupportedError(f"{name} has no chat template; {hint}")


def load_llm(engine: EngineOptions, *, needs_chat_template: bool = False, **more: Any) -> "LLM":
    """Make the LLM of llm_arguments, and warn if its context is shorter than the model's."""
    if needs_chat_template:
        check_chat_template(engine)
    with busy("Starting"):
        from nanoinfer.llm import LLM  # imports torch

    llm = _load(LLM, engine, {"seed": 0} | more)  # resolve_sampling_params draws the seeds of requests
    if llm.engine.tokenizer is None:
        raise CheckpointNotFoundError(
            f"{engine.model} has no tokenizer files, such as tokenizer.json; name a tokenizer with --tokenizer"
        )
    return llm


def load_async_llm(engine: EngineOptions, **more: Any) -> "AsyncLLM":
    """Make an AsyncLLM, as load_llm makes an LLM."""
    with busy("Starting"):
        from nanoinfer.server.async_llm import AsyncLLM

    return _load(AsyncLLM, engine, more)


def llm_arguments(engine: EngineOptions, **more: Any) -> dict[str, Any]:
    """Return the arguments of LLM: those of the options, replaced by `more`.

    Process-wide: sets the number of torch's threads, and imports modules of the user's own (import_modules).
    """
    import torch  # takes a second, so --help and --version do not import it

    from nanoinfer.system.process import limit_threads

    arguments = asdict(engine) | more
    names = ("scheduler_cls", "block_manager_cls", "speculative_config", "stages", "logits_processors")
    import_modules(arguments.pop("imports"), *(arguments[name] for name in names))
    if (threads := arguments.pop("threads")) is not None:
        limit_threads()  # it acts once per process, so it does not overwrite --threads later
        torch.set_num_threads(threads)
    if engine.lora is not None:
        arguments["lora"] = dict(map(parse_adapter, engine.lora))
    if engine.speculative_config is not None:
        arguments["speculative_config"] = read_json("--speculative-config", engine.speculative_config)
    return arguments


def _load(kind: Callable[..., L], engine: EngineOptions, more: dict[str, Any]) -> L:
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL, locate

    arguments = llm_arguments(engine, **more)
    name = DEFAULT_MODEL if engine.model is None else engine.model
    locate(name, engine.revision)  # a download shows progress bars of its own
    with busy(f"Loading {name}"):
        llm = kind(**arguments)
    info = llm.engine.executor.info
    if arguments["max_model_len"] is None and info.max_model_len < info.max_position_embeddings:  # otherwise LLM logs it
        lowered = f"max_model_len is {info.max_model_len}, not the model's {info.max_position_embeddings}"
        print(f"{lowered}: the KV cache holds no more; raise --kv-cache-memory", file=sys.stderr)
    return llm


def import_modules(names: list[str] | None, *class_names: object) -> None:
    """Import modules. Python finds them in the current folder, too, as well as classes that options name. Process-wide."""
    if (names or any(class_names)) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names or ():
        try:
            import_module(name)
        except ImportError as error:
            raise InvalidValueError(
                f"--import {name} failed ({error}); give the name of a module, such as my_module, that is installed or in the "
                "current folder"
            ) from error


def check_packages(extra: str, *names: str) -> None:
    """Raise NanoinferError if a package of an extra is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise NanoinferError(f"this needs packages that are not installed ({', '.join(missing)}); {install_command(extra)}")


def ray_resources(engine: EngineOptions) -> dict[str, float]:
    """Return what Ray reserves for one engine, in the cluster that this process is connected to.

    The device auto is a GPU if the cluster has GPUs, because a process for which Ray reserves no GPU sees none.
    """
    import ray

    if engine.device not in ("auto", "cpu", "cuda"):
        raise InvalidValueError(f"on Ray --device must be auto, cpu or cuda, got {engine.device!r}; Ray chooses which GPU")
    is_on_gpu = engine.device == "cuda" or (engine.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return {"num_cpus": engine.threads or 1, "num_gpus": float(is_on_gpu)}


def resolve_sampling_params(llm: "LLM", sampling: dict[str, Any], **more: Any) -> SamplingParams:
    """Return the checkpoint's defaults, replaced by the options, and `more` fields of SamplingParams, that are not None.

    A seed is drawn where none is given.
    """
    given = {name: value for name, value in (sampling | more).items() if value is not None}
    params = over_default(llm.get_default_sampling_params(), **given)
    if params.seed is None:
        params = with_seed(params)
        logger.info("seed %d was drawn: --seed %d and the same command give the same text", params.seed, params.seed)
    return params


def with_seed(params: SamplingParams) -> SamplingParams:
    """Draw a seed if there is none. It has 32 bits, which are short enough to type."""
    return replace(params, seed=secrets.randbits(32)) if params.seed is None else params


def resolve_chat_template_kwargs(llm: "LLM", options: ChatTemplateOptions) -> dict[str, object]:
    """Return the variables for the template of an LLM, which must contain them."""
    given = read_json("--chat-template-kwargs", options.chat_template_kwargs or "{}")
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


def read_json(name: str, text: str) -> Any:
    """Parse the value of an option that is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{name} must be JSON, got {text!r} ({error})") from error


def read_standard_input() -> str:
    """Read standard input as read_file reads a file. It is empty where the shell has closed it (`<&-`)."""
    if sys.stdin is None:
        return ""
    try:
        return io.StringIO(sys.stdin.read().removeprefix("\ufeff"), newline=None).getvalue().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidPromptError(f"standard input is not valid text ({error}); give UTF-8, and set PYTHONUTF8=1") from error


def check_writable(path: Path) -> None:
    """Raises: InvalidValueError if a file cannot be written, before the work whose result it gets."""
    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir():
        reason = "it is a folder" if path.is_dir() else "there is no such folder"
        raise InvalidValueError(f"cannot write {path}: {reason}; give another path")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidValueError(f"cannot write {path}: permission denied; give another path")


def read_file(path: Path) -> str:
    """Read a UTF-8 text file, without the newline at its end. A byte order mark and line ends of Windows are accepted."""
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidPromptError(f"{path} is not valid UTF-8 text ({error})") from error
