"""The web page at /. In: page.html. Out: a page that may run only its own script and may not call other servers."""

import secrets
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from nanoinfer.arguments import declarations
from nanoinfer.features.tracing import viewer
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.async_llm import AsyncLLM

_CHATS = [f"Tell me a story about {name}" for name in ("Lily", "Tom", "Felix")]  # what the bundled models can do
_TEXTS = ["Once upon a time", "Lily was"]
_TEMPLATE = Path(__file__).with_name("page.html")
_NUMBERS = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty max_tokens seed".split()


def add_page(app: FastAPI, async_llm: AsyncLLM, model: str) -> None:
    """Add the page, which needs no key."""
    tokenizer, default = async_llm.engine.tokenizer, async_llm.llm.get_default_sampling_params()
    is_chat = tokenizer is not None and tokenizer.hf.chat_template is not None
    is_bundled = async_llm.llm.checkpoint.is_bundled
    config = {
        "model": model,
        "is_chat": is_chat,
        "examples": [] if not is_bundled else _CHATS if is_chat else _TEXTS,
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
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        text = template.replace('nonce="NONCE"', f'nonce="{nonce}"')
        return Response(text, headers=headers, media_type="text/html; charset=utf-8")
