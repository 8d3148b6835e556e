"""A server in a thread of this process, on a free port, and what tests ask it."""

import socket
import threading
import time
from contextlib import contextmanager

import httpx2

from nanoinfer import AsyncLLM
from nanoinfer.server.listen import bind
from nanoinfer.server.run import Server
from nanoinfer.server.settings import ServerSettings
from tests.helpers import tiny_models


class HttpServer:
    """url: of the server. async_llm, app: behind it."""

    def __init__(self, async_llm, port, app=None):
        self.async_llm, self.port, self.app = async_llm, port, app
        self.url = f"http://127.0.0.1:{port}"

    def request(self, method, path, **options):
        """verify=False: reading the certificates of the authorities takes longer than most answers."""
        return httpx2.request(method, self.url + path, timeout=600, verify=False, **options)

    def post(self, path, body=None, **options):
        return self.request("POST", path, **({"json": body} if body is not None else {}), **options)

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def num_unfinished(self):
        return self.async_llm.engine.num_unfinished

    def wait_until_busy(self):
        """Wait until a request has arrived."""
        _wait_until(self.num_unfinished, "no request has arrived")

    def wait_until_idle(self):
        """Wait until nothing runs."""
        _wait_until(lambda: not (self.num_unfinished() or self.async_llm.num_unfinished_answers), "requests are left")

    def open_stream(self, body, path="/v1/completions"):
        """A raw socket on which the request was sent and nothing was read."""
        import json

        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


def _wait_until(is_true, words):
    start = time.perf_counter()
    while not is_true():
        assert time.perf_counter() - start < 120, words
        time.sleep(0.005)


@contextmanager
def serving(load=lambda: AsyncLLM("tiny-qwen3", seed=0), *, shutdown_timeout=0.0, bound=None, ssl_context=None, **settings):
    """Serve what load() returns, on a free port or on a bound socket. Afterwards every block is free and no task is left."""
    async_llm = load()
    settings = ServerSettings(served_model_name=("tiny-qwen3", "alias"), **settings)
    server = Server(async_llm, settings, shutdown_timeout=shutdown_timeout, ssl_context=ssl_context)
    bound = bound or bind("127.0.0.1", 0)[0]
    server.config.log_level = "warning"
    server.config.configure_logging()
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield HttpServer(async_llm, bound.getsockname()[1], server.config.app)
    finally:
        server.should_exit = True
        thread.join(timeout=600)
        assert not thread.is_alive()
        tiny_models.assert_nothing_is_left(async_llm)
        assert async_llm.num_unfinished_answers == 0


def new_client(server, *, strict):
    """OpenAI's client. strict: it checks the shape of every answer."""
    import openai

    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600, _strict_response_validation=strict
    )
