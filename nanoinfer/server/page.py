"""The web page at /, and with `nanoinfer serve --trace` the replays of recent answers.

In: page.html, and a RecentRecorder, which is the LLM's tracer. Out: two HTML pages, which may run only their own scripts and
may not call other servers.
"""

import asyncio
import secrets
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from nanoinfer.arguments import declarations
from nanoinfer.async_llm import AsyncLLM
from nanoinfer.features.tracing import viewer
from nanoinfer.features.tracing.recent import RecentRecorder
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.answers import Answers
from nanoinfer.server.errors import RequestError

MAX_REPLAYS = 100  # the number of answers whose replays are kept
_CHATS = [f"Tell me a story about {name}" for name in ("Lily", "Tom", "Felix")]  # what the bundled models can do
_TEXTS = ["Once upon a time", "Lily was"]
_TEMPLATE = Path(__file__).with_name("page.html")
_NUMBERS = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty max_tokens seed".split()


class Replays:
    """The recent answers by their ids, and the pages that replay them."""

    def __init__(self, recorder: RecentRecorder) -> None:
        self._recorder = recorder
        self._answers: dict[str, Answers] = {}

    def add(self, answers: Answers) -> None:
        """Keep an answer, and drop the oldest if there are more than MAX_REPLAYS."""
        self._answers[answers.id] = answers
        if len(self._answers) > MAX_REPLAYS:
            del self._answers[next(iter(self._answers))]

    async def page(self, response_id: str) -> str:
        """Return the replay of the answer with this id, such as "chatcmpl-...". Raises: RequestError, 404, if there is none."""
        answers = self._answers.get(response_id.replace("_", "-").partition("-")[2])
        page = None
        if answers is not None:
            request_ids = [stream.request_id for stream in answers.streams]
            page = await asyncio.to_thread(self._recorder.replay, request_ids)
        if page is None:
            raise RequestError(
                404,
                "this answer's steps are not recorded, or not any more: the server keeps the newest steps, and the last "
                f"{MAX_REPLAYS} answers; generate it again with the same seed",
            )
        return page


def add_page(app: FastAPI, async_llm: AsyncLLM, model: str, replays: Replays | None) -> None:
    """Add the page, which needs no key, and the replays, which need a key if /v1 does."""
    tokenizer, default = async_llm.engine.tokenizer, async_llm.llm.get_default_sampling_params()
    is_chat = tokenizer is not None and tokenizer.hf.chat_template is not None
    is_bundled = async_llm.llm.checkpoint.is_bundled
    config = {
        "model": model,
        "is_chat": is_chat,
        "examples": [] if not is_bundled else _CHATS if is_chat else _TEXTS,
        "has_replays": replays is not None,
        "numbers": [
            {
                "name": name,
                "title": " ".join(declarations(SamplingParams)[name].sentences),
                "step": "any" if declarations(SamplingParams)[name].kind is float else 1,
                "placeholder": {"max_tokens": "", "seed": "random"}.get(name, getattr(default, name)),
            }
            for name in _NUMBERS
        ],
    }
    template = viewer.fill(_TEMPLATE, {"/* CONFIG */ {}": viewer.as_script(config)})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        nonce = secrets.token_urlsafe(16)
        return _html(template.replace('nonce="NONCE"', f'nonce="{nonce}"'), f"'nonce-{nonce}'", connect="'self'")

    if replays is not None:

        @app.get("/trace/{response_id}", include_in_schema=False)
        async def replay(response_id: str) -> Response:
            return _html(await replays.page(response_id), "'unsafe-inline'", connect="'none'")


def _html(text: str, script: str, *, connect: str) -> Response:
    policy = (
        f"default-src 'none'; script-src {script}; connect-src {connect}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")
