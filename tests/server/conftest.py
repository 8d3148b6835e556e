"""The server's tests need its extra, and the clients that the extra [test] installs."""

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx2"):
    pytest.importorskip(name, reason=f'{name} is not installed; pip install -e ".[test]"')

import http_server  # noqa: E402

from nanoinfer import LLM  # noqa: E402


@pytest.fixture(scope="session")
def server():
    with http_server.serving() as running:
        yield running


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
