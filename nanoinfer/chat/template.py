"""Chat messages -> text, with a Jinja template, in a process of its own that is stopped at a limit.

In: a template, messages, the template's variables. Out: the text, or an InvalidPromptError.

A chat template is a program that comes with a checkpoint. jinja2's sandbox limits what it reaches, not what it costs, and one
operation of it ("a" * 10**10) takes any time and memory, and cannot be interrupted in Python. A process can be stopped. The
renderer is started at the first chat (0.7 s, most of it transformers' import) and kept: a later chat waits some 0.3 ms for it.
"""

import json
from collections.abc import Callable

from nanoinfer.errors import InvalidPromptError, first_line
from nanoinfer.system.helper_process import HelperProcess, serve
from nanoinfer.tokenization.tokenizer import Tokenizer

MAX_SECONDS = 1.0  # of the processor
MAX_STOPPED_SECONDS = 3.0  # after which a renderer that neither replies nor ends is killed
MAX_WAIT_SECONDS = 5.0  # for the chats of others
MAX_BYTES = 2**28  # beyond what the renderer takes before its first template
MAX_CHARACTERS = 2**23
# Characters from which on a chat has a renderer of its own, so that others do not wait for it. They include the template, so
# they are twice work_threads.LARGE, lest a small chat with a long template waits for large ones.
LARGE_REQUEST = 2**17


def apply_chat_template(
    tokenizer: Tokenizer, messages: list[dict[str, object]], /, chat_template: str | None = None, **variables: object
) -> str:
    """Chat messages as one text, for `encode(..., add_special_tokens=False)`, because the template writes BOS itself.

    chat_template: instead of the tokenizer's. variables: of the template, where add_generation_prompt is True by default.
    """
    if chat_template is None and tokenizer.hf.chat_template is None:
        raise InvalidPromptError(
            "this checkpoint's tokenizer has no chat template; use plain text instead of messages, or another chat template"
        )
    arguments = {"add_generation_prompt": True, **tokenizer.hf.special_tokens_map, **variables}  # as in transformers
    arguments |= {"conversation": messages, "chat_template": chat_template}
    try:
        request = json.dumps([tokenizer.hf.chat_template, arguments])
    except Exception as error:  # also of the user's own classes
        raise InvalidPromptError(f"messages and chat_template_kwargs must be JSON ({first_line(error)})") from error
    reply = (_renderer if len(request) <= LARGE_REQUEST else _large_renderer).ask(request)
    if reply is None:
        raise InvalidPromptError(f"the chat template was stopped: it took more than {MAX_SECONDS} s, or crashed")
    if "error" in reply:
        raise InvalidPromptError(f"the chat template refused the messages: {reply['error']}")
    return str(reply["text"])


_renderer, _large_renderer = (
    HelperProcess(__name__, subject, max_wait=MAX_WAIT_SECONDS, max_seconds=MAX_STOPPED_SECONDS)
    for subject in ("chat templates", "long chats")
)


# ---- in the other process


def _prepare() -> Callable[[bytes], dict[str, str]]:
    """Return the function that renders one conversation."""
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
    serve(_prepare, max_seconds=MAX_SECONDS, max_bytes=MAX_BYTES)
