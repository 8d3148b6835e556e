"""Messages from a terminal: a line with editing and history, a pasted text, or several lines between triple quotes.

In: what the user types. Out: one message at a time. GNU readline edits the line, keeps the history and takes a pasted text with
its newlines as one input (bracketed paste). Where Python has no readline module, the terminal's own editing remains.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from nanoinfer.cli.options import print_error
from nanoinfer.errors import InvalidPromptError

try:
    import readline
except ImportError:  # Windows, and Pythons that were built without it
    readline = None  # type: ignore[assignment]

MAX_HISTORY_LINES = 1000
QUOTES = '"""'


class MessageReader:
    """Reads messages. The history file keeps what was typed for the next chat."""

    def __init__(self) -> None:
        folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._history = Path(folder).expanduser() / "nanoinfer" / "chat_history"
        if readline is not None:
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
            readline.set_history_length(MAX_HISTORY_LINES)
            with suppress(OSError):  # there is none yet
                readline.read_history_file(self._history)

    def read(self) -> str | None:
        """Return the next message that is not empty, or None at the end: Ctrl-D, or Ctrl-C twice in a row."""
        was_interrupted = False
        while True:
            try:
                message = self._read_lines()
                message.encode()  # in some locales, bytes that are no text arrive as lone surrogates
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
                print_error(InvalidPromptError(f"the line is not valid text ({error})"))
            else:
                self._save_history()
                if message.strip():
                    return message

    def _read_lines(self) -> str:
        """One line, a pasted text, or the text between triple quotes. The quotes are removed."""
        text = _input(">>> ").rstrip()
        if not text.startswith(QUOTES):
            return text
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            text += "\n" + _input("... ").rstrip()
        return text.removesuffix(QUOTES).strip("\n")

    def _save_history(self) -> None:
        """Write the file after every message, because a chat often ends with its window."""
        if readline is not None:
            with suppress(OSError):  # a folder that cannot be written: the history ends with the process
                self._history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(self._history)


def _input(prompt: str) -> str:
    """input(), with the prompt on standard error if standard output is not the terminal."""
    if not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)
