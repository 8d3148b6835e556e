"""`nanoinfer chat`: a conversation with a model that has a chat template, or the answer to one question.

In: options, and a terminal or a pipe. chat_session.py answers, line_input.py reads, conversation.py keeps the messages.
"""

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nanoinfer import __version__
from nanoinfer.cli.chat_session import ChatSession, note
from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.line_input import MessageReader
from nanoinfer.cli.options import (
    ChatTemplateOptions,
    EngineOptions,
    MaxModelLen,
    MaxTokens,
    SamplingOptions,
    Stop,
    expand_options,
    load_llm,
    print_error,
    read_standard_input,
    resolve_chat_template_kwargs,
    resolve_sampling_params,
)
from nanoinfer.errors import InvalidPromptError, NanoinferError

logger = logging.getLogger(__name__)


@expand_options
def chat(
    *,
    question: Annotated[str | None, typer.Argument(help="Answer this and exit. Text from a pipe is put before it.")] = None,
    engine: EngineOptions,
    max_model_len: MaxModelLen = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = 1024,
    stop: Stop = None,
    template: ChatTemplateOptions,
    stats: Annotated[bool, typer.Option("--stats", help="Show the speed of each answer.")] = False,
) -> None:
    """Talk to a model that has a chat template.

    On a terminal, /help lists the commands, Ctrl-C stops an answer, and Ctrl-D or /exit ends the chat.
    A question on the command line, or from a pipe, is answered once.
    """
    from nanoinfer.models.checkpoint import DEFAULT_MODEL, locate  # takes a second to import, as LLM does

    model = DEFAULT_MODEL if engine.model is None else engine.model
    locate(model, engine.revision)  # a download shows progress bars of its own, so it comes before the spinner
    with Console(stderr=True).status(Text(f"Loading {model}")):  # on a terminal only
        llm = load_llm(engine, max_model_len=max_model_len)
    conversation = Conversation(llm, system, resolve_chat_template_kwargs(llm, template))
    params = resolve_sampling_params(llm, sampling, max_tokens=max_tokens, stop=stop)
    session = ChatSession(llm, conversation, params, shows_stats=stats)
    logger.info("seed of the first answer: %d", session.params.seed)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if question is None and is_terminal:
        _converse(session, model)
        return
    session.ask(_join("" if is_terminal else read_standard_input(), question))
    if session.output is None:
        raise typer.Exit(130)  # Ctrl-C stopped it: the code that a shell gives


def _join(piped: str, question: str | None) -> str:
    """The question of the command line, after what a pipe gives."""
    text = "\n\n".join(part for part in (piped, question) if part)
    if not text.strip():
        raise InvalidPromptError("there is no question: standard input is empty; pipe a text, or write it after the command")
    return text


def _converse(session: ChatSession, model: str) -> None:
    session.conversation.render("Hello")  # refuses a model without a chat template before anything is typed
    info = session.llm.engine.executor.info
    note(f"nanoinfer {__version__}, {model}, {info.device}, {info.dtype}, context of {info.max_model_len} tokens")
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
