"""Render chat messages as text by a Jinja template, in a separate process that is stopped at a limit.

A chat template is a program that comes with a checkpoint. jinja2's sandbox limits what it reaches, not what it costs: a single
operation ("a" * 10**10) may take any time and memory, and Python cannot interrupt it. A process can be stopped. The
renderer is started at the first chat (0.7 s, most of it transformers' import) and kept: a later chat waits some 0.3 ms for it.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nanoinfer.errors import InvalidPromptError, first_line
from nanoinfer.system.helper_process import HelperProcess, serve
from nanoinfer.tokenization.tokenizer import Tokenizer

MAX_SECONDS = 1.0  # CPU seconds for one request
MAX_STOPPED_SECONDS = 3.0  # a renderer that has neither replied nor ended after this time is killed
MAX_WAIT_SECONDS = 5.0  # how long a request may wait while the chats of other requests are rendered
MAX_BYTES = 2**28  # the memory that templates may take, besides what an idle renderer has
MAX_CHARACTERS = 2**23
# Requests with more characters, the template included, use a second renderer, so that small chats need not wait. The limit is
# four times worker_threads.LARGE, since a small chat may have a long template.
LARGE_REQUEST = 2**16


def apply_chat_template(
    tokenizer: Tokenizer, messages: list[dict[str, object]], /, chat_template: str | None = None, **variables: object
) -> str:
    """Return chat messages as one text, for `encode(..., add_special_tokens=False)`, because the template writes BOS itself.

    chat_template: a Jinja template. None: the tokenizer's. variables: passed to the template. add_generation_prompt is True
    unless it is given. Contents that are strings become lists of one text part if the template reads only lists.
    """
    if chat_template is None and tokenizer.hf.chat_template is None:
        raise InvalidPromptError(
            "this checkpoint's tokenizer has no chat template; use plain text instead of messages, or another chat template"
        )
    arguments = {"add_generation_prompt": True, **tokenizer.hf.special_tokens_map, **variables}  # as in transformers
    arguments |= {"conversation": messages, "chat_template": chat_template}
    try:
        request = json.dumps([tokenizer.hf.chat_template, arguments])
    except Exception as error:  # the user's own classes may raise anything
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


# ---- in the renderer's process


def _prepare() -> Callable[[bytes], dict[str, str]]:
    """Return the function that renders a conversation."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    known: dict[tuple[str, str], bool] = {}

    def as_parts(text: str) -> object:
        return [{"type": "text", "text": text}]

    def reads_parts(index: int, arguments: dict[str, Any]) -> bool:
        """Whether the template writes contents of a message's role only as lists of parts, found with a text of ours."""
        role, probe = str(arguments["conversation"][index].get("role")), "40417"
        key = tokenizer.get_chat_template(arguments["chat_template"], tools=arguments.get("tools")), role

        def writes(as_content: Callable[[str], object], as_others: Callable[[str], object]) -> bool:
            texts = ((other, other.get("content")) for other in arguments["conversation"])
            messages = [other | {"content": as_others(text)} if isinstance(text, str) else other for other, text in texts]
            messages[index] = messages[index] | {"content": as_content(probe)}
            with suppress(Exception):  # a template may raise anything
                probing = arguments | {"conversation": messages, "continue_final_message": False}
                text = tokenizer.apply_chat_template(**probing, tokenize=False)
                return probe in text and not any(listed in text for listed in ("'type': 'text'", '"type": "text"'))
            return False

        if key in known:
            return known[key]
        if len(known) > 100:  # a request may bring its own template
            known.clear()
        for forms in ((str, str), (as_parts, str), (as_parts, as_parts)):
            if writes(*forms):  # otherwise the template refuses these messages, but perhaps not others
                known[key] = forms[0] is as_parts
                return known[key]
        return False

    def reply(request: bytes) -> dict[str, str]:
        try:
            tokenizer.chat_template, arguments = json.loads(request)
            for index, message in enumerate(arguments["conversation"]):
                content = message.get("content")
                if isinstance(content, str) and reads_parts(index, arguments):
                    message["content"] = as_parts(content)
            text = tokenizer.apply_chat_template(**arguments, tokenize=False)
        except MemoryError:
            return {"error": f"it takes more than {MAX_BYTES >> 20} MiB"}
        except Exception as error:  # a template may raise anything
            return {"error": first_line(error)[:500]}
        if len(text) > MAX_CHARACTERS:
            return {"error": f"its text has {len(text)} characters, more than {MAX_CHARACTERS}"}
        return {"text": text}

    return reply


if __name__ == "__main__":
    serve(_prepare, max_seconds=MAX_SECONDS, max_bytes=MAX_BYTES)
