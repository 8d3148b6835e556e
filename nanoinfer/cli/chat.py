"""`nanoinfer chat`: a conversation with a model, in this process or behind a URL, or the answer to one question.

In: options, and a terminal or a pipe. chat_session.py answers, line_input.py reads, conversation.py keeps the messages,
chat_model.py is the model.
"""

import logging
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nanoinfer import __version__
from nanoinfer.cli.chat_model import ChatModel, LocalModel, RemoteModel
from nanoinfer.cli.chat_session import ChatSession, note
from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.line_input import MessageReader
from nanoinfer.cli.options import (
    ChatTemplateOptions,
    EngineOptions,
    MaxModelLen,
    SamplingOptions,
    Stop,
    expand_options,
    load_llm,
    print_error,
    read_standard_input,
    resolve_chat_template_kwargs,
    resolve_sampling_params,
)
from nanoinfer.errors import InvalidPromptError, InvalidValueError, NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.client import Client

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 1024  # of a model in this process


@expand_options
def chat(
    *,
    question: Annotated[str | None, typer.Argument(help="Answer this and exit. Text from a pipe is put before it.")] = None,
    url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server that has the model, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key. Default: OPENAI_API_KEY of the environment.")] = None,
    engine: EngineOptions,
    max_model_len: MaxModelLen = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    sampling: SamplingOptions,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Most tokens to generate. Default: 1024, or the server's.")
    ] = None,
    stop: Stop = None,
    template: ChatTemplateOptions,
    stats: Annotated[bool, typer.Option("--stats", help="Show the speed of each answer.")] = False,
) -> None:
    """Talk to a model that has a chat template, or to a server.

    On a terminal, /help lists the commands, Ctrl-C stops an answer, and Ctrl-D or /exit ends the chat.
    A question on the command line, or from a pipe, is answered once.
    """
    model: ChatModel
    if url is None:
        if api_key is not None:
            raise InvalidValueError("--api-key is a server's; give its --url, too")
        model, params = _load(engine, max_model_len, sampling, max_tokens, stop, template)
    else:
        _refuse_options_of_an_engine(engine, max_model_len)
        client = Client(url, api_key=api_key or os.environ.get("OPENAI_API_KEY"))
        given = asdict(sampling) | {"max_tokens": max_tokens, "stop": stop}
        given = {name: value for name, value in given.items() if value is not None}
        params = SamplingParams(**{"max_tokens": None} | given)
        template_kwargs = resolve_chat_template_kwargs(None, template)
        model = RemoteModel(client, engine.model or client.first_model(), set(given), template_kwargs)
    session = ChatSession(Conversation(model, system), params, shows_stats=stats)
    if url is None or sampling.seed is not None:
        logger.info("seed of the first answer: %d", session.params.seed)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if question is None and is_terminal:
        _converse(session)
        return
    session.ask(_join("" if is_terminal else read_standard_input(), question))
    if session.output is None:
        raise typer.Exit(130)  # Ctrl-C stopped it: the code that a shell gives


def _load(
    engine: EngineOptions,
    max_model_len: int | None,
    sampling: SamplingOptions,
    max_tokens: int | None,
    stop: list[str] | None,
    template: ChatTemplateOptions,
) -> tuple[LocalModel, SamplingParams]:
    """Load a model into this process."""
    from nanoinfer.models.checkpoint import DEFAULT_MODEL, locate  # takes a second to import, as LLM does

    name = DEFAULT_MODEL if engine.model is None else engine.model
    locate(name, engine.revision)  # a download shows progress bars of its own, so it comes before the spinner
    with Console(stderr=True).status(Text(f"Loading {name}")):  # on a terminal only
        llm = load_llm(engine, max_model_len=max_model_len)
    model = LocalModel(llm, name, resolve_chat_template_kwargs(llm, template))
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    return model, resolve_sampling_params(llm, sampling, max_tokens=max_tokens, stop=stop)


def _refuse_options_of_an_engine(engine: EngineOptions, max_model_len: int | None) -> None:
    given = asdict(engine) | {"max_model_len": max_model_len}
    default = asdict(EngineOptions(model=engine.model)) | {"max_model_len": None}
    if names := [f"--{name.replace('_', '-')}" for name in given if given[name] != default[name]]:
        raise InvalidValueError(f"{', '.join(names)} cannot change a server's model; leave it out, or leave --url out")


def _join(piped: str, question: str | None) -> str:
    """The question of the command line, after what a pipe gives."""
    text = "\n\n".join(part for part in (piped, question) if part)
    if not text.strip():
        raise InvalidPromptError("there is no question: standard input is empty; pipe a text, or write it after the command")
    return text


def _converse(session: ChatSession) -> None:
    session.conversation.render("Hello")  # refuses a model without a chat template before anything is typed
    note(f"nanoinfer {__version__}, {session.model.describe()}")
    note("/help lists the commands. Ctrl-C stops an answer. Ctrl-D ends the chat.")
    reader = MessageReader()
    while (message := reader.read()) is not None:
        try:
            session.handle(message)
        except EOFError:  # /exit
            break
        except NanoinferError as error:
            print_error(error)
        except KeyboardInterrupt:  # outside an answer
            note("")
        note("")
