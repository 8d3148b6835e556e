"""Chat messages -> text, with a Jinja template, in a process of its own that is stopped at a limit.

In: a template, messages, the template's variables. Out: the text, or an InvalidPromptError.

A chat template is a program that comes with a checkpoint. jinja2's sandbox limits what it reaches, not what it costs, and one
operation of it ("a" * 10**10, or a list that holds itself twice, 50 times over, as text) takes any time and memory. Python
cannot interrupt such an operation: signals and trace functions run between operations. A process can be stopped. The renderer
is started at the first chat (0.7 s, most of it transformers' import) and kept: a later chat waits some 0.3 ms for it.

On Linux its memory is limited too. helper_process.py starts and stops it, and `main` is what it runs.
"""

import json
from collections.abc import Callable
from typing import Any

from nanoinfer.errors import InvalidPromptError, first_line
from nanoinfer.tokenization.helper_process import HelperProcess, serve

MAX_SECONDS = 1.0
MAX_WAIT_SECONDS = 5.0  # for the chats of others
MAX_BYTES = 2**28  # beyond what the renderer takes before its first template
MAX_CHARACTERS = 2**23


def render(template: object, arguments: dict[str, Any]) -> str:
    """Return the text of apply_chat_template(**arguments) in transformers, of a tokenizer with this chat_template.

    Raises:
        InvalidPromptError: The template refuses the arguments, fails, or exceeds a limit. The arguments are not JSON.
        QueueFullError: The templates of others took MAX_WAIT_SECONDS.
    """
    try:
        request = json.dumps([template, arguments])
    except Exception as error:  # also of the user's own classes
        raise InvalidPromptError(f"messages and chat_template_kwargs must be JSON ({first_line(error)})") from error
    reply = _renderer.ask(request)
    if reply is None:
        raise InvalidPromptError(f"the chat template was stopped: it took more than {MAX_SECONDS} s, or crashed")
    if "error" in reply:
        raise InvalidPromptError(f"the chat template refused the messages: {reply['error']}")
    return str(reply["text"])


_renderer = HelperProcess(__name__, "chat templates", max_wait=MAX_WAIT_SECONDS)


# ---- in the other process


def main() -> None:
    """Render one conversation per line."""
    serve(_prepare, max_seconds=MAX_SECONDS, max_bytes=MAX_BYTES)


def _prepare() -> Callable[[bytes], dict[str, str]]:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))

    def reply(request: bytes) -> dict[str, str]:
        try:
            tokenizer.chat_template, arguments = json.loads(request)
            text = tokenizer.apply_chat_template(**arguments, tokenize=False)
        except MemoryError:
            return {"error": f"it takes more than {MAX_BYTES >> 20} MiB"}
        except Exception as error:  # a template raises what it likes
            return {"error": first_line(error)[:500]}
        if len(text) > MAX_CHARACTERS:
            return {"error": f"its text has {len(text)} characters, more than {MAX_CHARACTERS}"}
        return {"text": text}

    return reply


if __name__ == "__main__":
    main()
