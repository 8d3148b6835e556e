"""The server's tests need its extra, and the clients that the extra [test] installs."""

import pytest

from tests.helpers.prepared import prepare

prepare()

for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx2"):
    pytest.importorskip(name, reason=f'{name} is not installed; pip install -e ".[test]"')

from nanoinfer import LLM, AsyncLLM  # noqa: E402
from tests.helpers import http_server  # noqa: E402

MAX_BODY_BYTES = 20_000  # of the guarded server


@pytest.fixture(scope="session")
def server():
    with http_server.serving() as running:
        yield running


@pytest.fixture(scope="session")
def guarded():
    """A server with two keys, behind a proxy, which reads small bodies."""
    settings = {"api_key": ("first key", "second"), "cors_origin": ("https://page.example",), "root_path": "/llm"}
    with http_server.serving(max_body_bytes=MAX_BODY_BYTES, **settings) as running:
        yield running


@pytest.fixture(scope="session")
def ignoring():
    with http_server.serving(ignore_unknown_fields=True) as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(tools_path):
    """A model whose tokenizer and chat template know tools and thinking."""
    with http_server.serving(lambda: AsyncLLM(tools_path, kv_cache_memory=2**24)) as running:
        yield running


@pytest.fixture(scope="session")
def soon(tool_server):
    """A bias with which random weights end their answers where they may."""
    ids = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids
    return {str(ids(token)): 100 for token in ("<think>", "</think>", "<|im_end|>")}


@pytest.fixture(scope="session")
def llm():
    """The engine whose tokens the server's must be."""
    return LLM("tiny-qwen3", seed=0)


@pytest.fixture(scope="session")
def client(server):
    with http_server.new_client(server, strict=True) as strict:
        yield strict


@pytest.fixture(scope="session")
def lenient_client(server):
    """For two shapes that OpenAI's types exclude and its API returns: a completion's chunk has finish_reason null, and the
    first token of an echoed prompt has the log-probability null.
    """
    with http_server.new_client(server, strict=False) as lenient:
        yield lenient
