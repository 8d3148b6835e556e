"""Chat messages -> text, with a Jinja template, in a process of its own that is stopped at a limit.

In: a template, messages, the template's variables. Out: the text, or an InvalidPromptError.

A chat template is a program that comes with a checkpoint. jinja2's sandbox limits what it reaches, not what it costs, and one
operation of it ("a" * 10**10, or a list that holds itself twice, 50 times over, as text) takes any time and memory. Python
cannot interrupt such an operation: signals and trace functions run between operations. A process can be stopped. The renderer
is started at the first chat (0.7 s, most of it transformers' import) and kept: a later chat waits some 0.3 ms for it.

On Linux its memory is limited too. `main` is what it runs: one line of JSON in, one line out.
"""

import atexit
import faulthandler
import json
import os
import subprocess
import sys
from inspect import isfunction
from threading import Lock
from typing import Any

from nanoinfer.errors import InvalidPromptError, NanoinferError, first_line

MAX_SECONDS = 1.0
MAX_BYTES = 2**28  # beyond what the renderer takes before its first template
MAX_CHARACTERS = 2**23


class Renderer:
    """The other process, which is started when it is first needed, and again after it was stopped. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it. A fork starts its own.

    def render(self, template: object, arguments: dict[str, Any]) -> str:
        """Return the text of apply_chat_template(**arguments) in transformers, of a tokenizer with this chat_template.

        Raises:
            InvalidPromptError: The template refuses the arguments, fails, or exceeds a limit. The arguments are not JSON.
        """
        try:
            request = json.dumps([template, arguments], default=_tool_schema).encode() + b"\n"
        except Exception as error:  # also of transformers, which describes tools
            raise InvalidPromptError(f"messages and chat_template_kwargs must be JSON ({first_line(error)})") from error
        with self._lock:
            try:
                reply = self._exchange(request)
            except BaseException:  # Ctrl-C, or a process that was killed: the next reply would be for this request
                self.close()
                raise
        if "error" in reply:
            raise InvalidPromptError(f"the chat template refused the messages: {reply['error']}")
        return str(reply["text"])

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()  # closes the pipes
        self._process = None

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = _start(), os.getpid()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise InvalidPromptError(f"the chat template was stopped: it took more than {MAX_SECONDS} s, or crashed")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _start() -> subprocess.Popen[bytes]:
    """Start the renderer with the modules that this process finds, and wait until it is ready."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    failed = NanoinferError(f"the process for chat templates did not start; `{sys.executable} -m {__name__}` shows why")
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process only
        )
    except OSError as error:
        raise failed from error
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.communicate()
        raise failed
    return process


def _tool_schema(value: object) -> Any:
    """A tool may be given as a function, which transformers describes by its docstring."""
    from transformers.utils import get_json_schema

    if isfunction(value):
        return get_json_schema(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


renderer = Renderer()
atexit.register(renderer.close)


# ---- in the other process


def main() -> None:
    """Answer one request per line, until the pipe is closed."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    replies, sys.stdout = sys.stdout.buffer, sys.stderr  # what a library prints is no reply
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    _limit_memory()
    replies.write(b"ready\n")
    replies.flush()
    for line in sys.stdin.buffer:
        # A thread that needs no interpreter ends the process, also in the middle of an operation.
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        reply = _reply(tokenizer, line)
        faulthandler.cancel_dump_traceback_later()
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _reply(tokenizer: Any, line: bytes) -> dict[str, str]:
    try:
        tokenizer.chat_template, arguments = json.loads(line)
        text = tokenizer.apply_chat_template(**arguments, tokenize=False)
    except MemoryError:
        return {"error": f"it takes more than {MAX_BYTES >> 20} MiB"}
    except Exception as error:  # a template raises what it likes
        return {"error": first_line(error)[:500]}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"its text has {len(text)} characters, more than {MAX_CHARACTERS}"}
    return {"text": text}


def _limit_memory() -> None:
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MAX_BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
