"""`nanoinfer chat` as people use it: keys are typed into a pseudo-terminal, and the screen is read."""

import codecs
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from nanoinfer.cli import chat

pty = pytest.importorskip("pty", reason="Windows has no pseudo-terminals")
termios = pytest.importorskip("termios")
readline = pytest.importorskip("readline")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no bracketed paste"),
]

UP, LEFT, CTRL_A, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x01", "\x03", "\x04"
PROMPT = "\x1b[?2004h>>> "  # readline turns bracketed paste on, and shows the prompt
TIMEOUT = 120  # seconds. A busy machine is no failure.


def test_without_a_home_folder_a_chat_reads_messages_and_keeps_no_history(no_home, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "readline", Mock())
    monkeypatch.setattr(chat, "_input", lambda prompt: "Hello")
    assert chat.MessageInput(lambda line: []).read() == "Hello"
    assert not any(tmp_path.iterdir())


def paste(text):
    """What a terminal sends for pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


class Terminal:
    """A process whose standard input, output and error are a terminal."""

    def __init__(self, code, state, columns=80, **environment):
        # A job in the background begins with Ctrl-C ignored.
        code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {code}"
        # The shell is the leader of a new session, so the first terminal that it opens becomes the session's: Ctrl-C works.
        shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1']
        self._main, self._side = pty.openpty()
        termios.tcsetwinsize(self._side, (24, columns))
        given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            [*shell, os.ttyname(self._side), sys.executable, "-c", code],
            start_new_session=True,
            env=given | {"TERM": "xterm", "INPUTRC": os.devnull, "XDG_STATE_HOME": str(state)} | environment,
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end inside a character
        self._screen = ""

    def send(self, keys):
        before, interrupt, after = keys.partition(CTRL_C)
        if interrupt:  # alone, and when the process waits: a signal before Python's wait for input is lost until the next key
            if before:
                self.send(before)
                self.wait_for(before)  # readline has read the keys
            self._wait_until_it_sleeps()
            self.interrupt()
            keys = after
        for start in range(0, len(keys), 500):  # the terminal's buffer is small, and the echo must be read
            os.write(self._main, keys[start : start + 500].encode())
            self._read(0)

    def interrupt(self):
        os.write(self._main, CTRL_C.encode())

    def _wait_until_it_sleeps(self):
        stat, end = Path(f"/proc/{self._process.pid}/stat"), time.monotonic() + TIMEOUT
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S" and time.monotonic() < end:
            time.sleep(0.01)

    def wait_for(self, text):
        """What the screen shows before and with the text. What came before the last wait is gone."""
        end = time.monotonic() + TIMEOUT
        while text not in self._screen:
            assert time.monotonic() < end, f"{text!r} is not in {self._screen[-2000:]!r}"
            self._read(0.1)
        before, _, self._screen = self._screen.partition(text)
        return before

    def type(self, message):
        """Type a message, wait for the next prompt, and return what was shown after the message."""
        self.send(message + "\r")
        return self.wait_for(PROMPT).partition("\x1b[?2004l\r")[2].replace("\r\n", "\n")

    def wait(self):
        """Wait for the end of the process. Returns its exit code and the rest of the screen."""
        code = self._process.wait(TIMEOUT)
        self._read(0)
        return code, self._screen

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._side)
        os.close(self._main)

    def _read(self, seconds):
        while select.select([self._main], [], [], seconds)[0]:
            self._screen += self._decoder.decode(os.read(self._main, 65536))
            seconds = 0


@pytest.fixture
def start(tmp_path):
    """Starts Python code in a terminal. All terminals are closed after the test, also if it fails."""
    terminals = []

    def in_terminal(code, state=tmp_path, columns=80, **environment):
        terminals.append(Terminal(code, state, columns, **environment))
        return terminals[-1]

    yield in_terminal
    for terminal in terminals:
        terminal.close()


READ = """
from nanoinfer.cli.chat import MessageInput
messages = MessageInput(lambda line: [])
while (message := messages.read()) is not None:
    print(ascii(message))
"""


def test_a_message_is_edited_recalled_pasted_and_quoted(start):
    """The reader alone, without a model."""
    terminal = start(f"exec({READ!r})")
    terminal.wait_for(PROMPT)

    def message(keys):
        return eval(terminal.type(keys).splitlines()[-1])

    assert message(f"wrld{LEFT * 3}o") == "world"
    assert message(f"my {CTRL_A}oh ") == "oh my"
    assert message(UP * 2) == "world"
    assert message("é\N{GRINNING FACE}") == "é\N{GRINNING FACE}"
    assert message("x" * 10_000) == "x" * 10_000
    assert message(paste("one\rtwo\r\rthree")) == "one\ntwo\n\nthree"
    assert (terminal.type(""), terminal.type(" ")) == ("", "")  # empty lines are skipped
    for quoted in ('"""one line"""', '"""\rone line\r"""', '"""one line\r"""'):
        assert message(quoted) == "one line"
    assert message('"""\r"one"\r  two\r\r""three"" """') == '"one"\n  two\n\n""three"" '
    assert message(paste('"""one\rtwo"""')) == "one\ntwo"

    terminal.send(f"not this{CTRL_C}")
    assert "Ctrl-C again, Ctrl-D or /exit ends the chat" in terminal.wait_for(PROMPT)
    assert message("this") == "this"
    terminal.send(f'"""not{CTRL_C}')
    terminal.wait_for(PROMPT)
    assert message("that") == "that"
    terminal.send(CTRL_D)
    assert terminal.wait()[0] == 0

    again = start(f"exec({READ!r})")
    again.wait_for(PROMPT)
    again.send(UP * 2 + "\r")
    assert "'this'" in again.wait_for(PROMPT)
    again.send(CTRL_C)
    again.wait_for(PROMPT)
    again.send(CTRL_C)
    assert again.wait()[0] == 0


def test_a_place_without_a_history_is_no_error_and_without_readline_the_terminal_gives_lines(start, tmp_path):
    (tmp_path / "file").touch()
    for code, state, prompt in (
        ("", tmp_path / "file", PROMPT),
        ("import sys; sys.modules['readline'] = None; ", tmp_path, ">>> "),
    ):
        terminal = start(f"{code}exec({READ!r})", state)
        terminal.wait_for(prompt)
        terminal.send("Hello\r")
        assert "'Hello'" in terminal.wait_for(prompt)
        terminal.send(CTRL_D)
        assert terminal.wait()[0] == 0


CHAT = """
import os, time
from nanoinfer.cli.main import app
from nanoinfer.engine.llm_engine import LLMEngine

def step(engine, step=LLMEngine.step):  # an answer lasts long enough to be interrupted while the file is there
    if os.path.exists(SLOW):
        time.sleep(0.1)
    return step(engine)

LLMEngine.step = step
app(ARGUMENTS)
"""


def test_a_chat_from_the_banner_to_the_exit(start, tmp_path):
    arguments = ["chat", "--max-model-len", "256", "--max-tokens", "20", "--stats", "--kv-cache-memory", str(2**24)]
    slow = tmp_path / "slow"
    terminal = start(f"SLOW, ARGUMENTS = {str(slow)!r}, {arguments}; exec({CHAT!r})", NO_COLOR="1")
    loading = terminal.wait_for("nanoinfer 0.")
    assert "Loading tiny-qwen3" in loading
    assert "cpu, float32, context of 256 tokens\r\n/help lists the commands." in terminal.wait_for(PROMPT)

    shown = terminal.type(f"Tell me a story about Tom{LEFT * 3}\x1b[3~\x1b[3~\x1b[3~Lily")
    *text, cut, stats = shown.splitlines()[:-1]
    assert "Lily" in " ".join(text)
    assert cut == "(the answer is cut: max_tokens is 20)"
    assert re.fullmatch(r"\(prompt .*, first token after [\d.]+ s, output 20 tokens, [\d.]+ tokens/s, context of .*\)", stats)

    assert "did you mean /help?" in terminal.type("/hlep")
    assert "temperature must be finite and >= 0, got -1" in terminal.type("/set temperature -1")
    assert "(top_k is 1)" in terminal.type("/set top_k 1")
    assert "maximum context length is 256 tokens" in terminal.type("x" * 10_000)

    # Ctrl-C in the middle of an answer: what was shown is kept.
    assert "(a new conversation)" in terminal.type("/clear")
    terminal.type("/set ignore_eos True")
    terminal.type("/set max_tokens None")
    slow.touch()
    terminal.send("Tell me a story about Tom\r")
    terminal.wait_for("\x1b[?2004l\r")  # the end of the echo
    terminal.wait_for(" ")
    terminal.interrupt()
    rest = terminal.wait_for(PROMPT)
    slow.unlink()
    assert "(stopped)" in rest

    # Four turns of 50 tokens and more fill the context.
    terminal.type("/set max_tokens 40")
    shown = [terminal.type("Tell me a story about Lily") for _ in range(6)]
    assert ["the oldest turns are left out" in text for text in shown].count(True) == 1
    assert not [text for text in shown if "error" in text or "output 40 tokens" not in text]

    file = tmp_path / "talk.json"
    assert "(saved 14 messages in" in terminal.type(f"/save {file}")
    messages = json.loads(file.read_text())
    assert messages[0]["content"] == "Tell me a story about Tom"
    terminal.send("/exit\r")
    code, screen = terminal.wait()
    assert code == 0
    assert "Traceback" not in screen


LOAD = """
import time
from nanoinfer.cli.options import busy
from nanoinfer.system.progress import progress_bar
with busy("Loading a model"), progress_bar("packing weights", 30) as bar:
    bar.delay = 0.2  # seconds, in place of 2
    for _ in range(30):
        time.sleep(0.02)
        bar.update()
print("loaded")
"""


def test_a_load_of_more_than_two_seconds_leaves_at_most_three_lines(start):
    shown = start(f"exec({LOAD!r})")
    screen = shown.wait_for("loaded")
    assert "Loading a model" in screen
    assert re.search(r"packing weights: +\d+%", screen)
    assert screen.count("\n") <= 3
