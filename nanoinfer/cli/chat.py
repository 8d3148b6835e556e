"""`nanoinfer chat`: a conversation with a model, or the answer to one question.

In: options, and a terminal or a pipe, from which this file reads. chat_session.py answers and keeps the messages. GNU readline
edits the line, keeps the history and takes a pasted text with its newlines as one input (bracketed paste). If Python has no
readline module, the terminal's own editing remains.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from nanoinfer import __version__
from nanoinfer.cli import options
from nanoinfer.cli.chat_session import ChatSession, complete, note
from nanoinfer.cli.commands import print_error
from nanoinfer.errors import InvalidPromptError, NanoinferError

try:
    import readline
except ImportError:  # Windows, and Pythons that were built without it
    readline = None  # type: ignore[assignment]

DEFAULT_MAX_TOKENS = 1024
MAX_HISTORY_LINES = 1000
QUOTES = '"""'


@options.expand_options
def chat(
    *,
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Answer this and exit. Text from a pipe is put before it.")
    ] = None,
    engine: options.EngineOptions,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    sampling: options.SamplingOptions,
    template: options.ChatTemplateOptions,
    stats: Annotated[bool, typer.Option("--stats", help="Show the speed of each answer.")] = False,
) -> None:
    """Talk to a model that has a chat template.
    On a terminal, /help lists the commands, Ctrl-C stops an answer, and Ctrl-D or /exit ends the chat.

    A question on the command line, or from a pipe, is answered once.
    """
    llm = options.load_llm(engine, needs_chat_template=True)
    template_kwargs = options.resolve_chat_template_kwargs(llm, template)
    if sampling["max_tokens"] is None:
        sampling["max_tokens"] = DEFAULT_MAX_TOKENS
    params = options.resolve_sampling_params(llm, sampling)
    session = ChatSession(llm, params, system, template_kwargs, shows_stats=stats)
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if question is None and is_terminal:
        _converse(session, engine.model)
        return
    piped = "" if is_terminal else options.read_standard_input()
    text = "\n\n".join(filter(None, (piped, question)))
    if not text.strip():
        raise InvalidPromptError("there is no question: standard input is empty; pipe a text, or write it after the command")
    session.ask(text)
    if session.output is None:
        raise typer.Exit(130)  # the exit code of a shell after Ctrl-C, which stopped the answer


def _converse(session: ChatSession, model: str | None) -> None:
    from nanoinfer.loading.checkpoint import DEFAULT_MODEL

    session.render("Hello")  # refuses a chat template that fails before the user types
    info = session.llm.info
    described = f"{model or DEFAULT_MODEL}, {info.device}, {info.dtype}, context of {info.max_model_len} tokens"
    note(f"nanoinfer {__version__}, {described}")
    note("/help lists the commands. Ctrl-C stops an answer. Ctrl-D ends the chat.")
    messages = MessageInput(complete)
    while (message := messages.read()) is not None:
        try:
            session.handle(message)
        except EOFError:  # raised by /exit
            break
        except NanoinferError as error:
            print_error(error)
        except KeyboardInterrupt:  # Ctrl-C outside an answer
            note("")
        note("")


class MessageInput:
    """Reads messages from the terminal, and keeps them in a history file for the next chat."""

    def __init__(self, complete: Callable[[str], list[str]]) -> None:
        """complete: returns possible completions of a line's last word, for the Tab key."""
        folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._history = Path(folder, "nanoinfer", "chat_history")
        if readline is not None:
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
            readline.set_history_length(MAX_HISTORY_LINES)
            readline.set_completer_delims(" ")
            readline.set_completer(
                lambda _, index: [*complete(readline.get_line_buffer()[: readline.get_endidx()]), None][index]
            )
            readline.parse_and_bind("bind ^I rl_complete" if "libedit" in str(readline.__doc__) else "tab: complete")
            with suppress(OSError, RuntimeError):  # there is no history yet, or the user has no home folder
                readline.read_history_file(self._history.expanduser())

    def read(self) -> str | None:
        """Return the next message that is not empty. None: after Ctrl-D, or after Ctrl-C twice in a row."""
        was_interrupted = False
        while True:
            try:
                message = self._read_lines()
                message.encode()  # in some locales, invalid bytes arrive as lone surrogates
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if was_interrupted:
                    return None
                was_interrupted = True
                print("(Ctrl-C again, Ctrl-D or /exit ends the chat)", file=sys.stderr)
            except UnicodeError as error:
                print_error(f"the line is not valid text ({error})")
            else:
                if readline is not None:  # after every message, because a chat often ends when its window is closed
                    with suppress(OSError, RuntimeError):  # without a folder to write, the history ends with the process
                        history = self._history.expanduser()
                        history.parent.mkdir(parents=True, exist_ok=True)
                        readline.write_history_file(history)
                if message.strip():
                    return message

    def _read_lines(self) -> str:
        """Read a line, a pasted text, or the text between triple quotes."""
        text = _input(">>> ").rstrip()
        if not text.startswith(QUOTES):
            return text
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            text += "\n" + _input("... ").rstrip()
        return text.removesuffix(QUOTES).strip("\n")


def _input(prompt: str) -> str:
    """Call input(), with the prompt on standard error if standard output is not the terminal."""
    if not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)
