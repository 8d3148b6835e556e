"""Run the server as a process: uvicorn, and its shutdown.

In: an AsyncLLM and the settings. After SIGTERM or Ctrl-C the server accepts no more requests. Running requests may finish until
a time limit, after which they end with an error, so that no client waits forever. A second Ctrl-C ends the server at once.
"""

import atexit
import gc
import logging
import socket
import ssl
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanoinfer.server.app import create_app
from nanoinfer.server.async_llm import AsyncLLM
from nanoinfer.server.limits import MAX_HEADER_BYTES
from nanoinfer.server.listen import url_of
from nanoinfer.server.settings import ServerSettings

logger = logging.getLogger("uvicorn.error")  # uvicorn's logger for everything but requests
KEEP_ALIVE_SECONDS = 5
SWITCH_INTERVAL = 0.002  # seconds that a thread may keep the interpreter while others wait (Python's default is 0.005)
FLUSH_SECONDS = 5  # the time for the last bytes of aborted requests. Then clients that do not read them are disconnected


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the headers of a request, and without upgrades to other protocols."""

    _reads_headers = False
    _num_bytes = 0

    def data_received(self, data: bytes) -> None:
        while data:
            self._data = data
            super().data_received(data)
            self._num_bytes += len(data)
            data = b"" if self._data is data else self._data
        if self._reads_headers and self._num_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._reads_headers, self._num_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reads_headers = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.__class__, self.cycle.chunked_encoding = ClosingCycle, False

    def _should_upgrade(self) -> bool:
        return any(name == b"upgrade" for name, _ in self.headers)

    def handle_websocket_upgrade(self) -> None:
        """Read a request again, without its Upgrade header, after which the parser would read no body."""
        num_read: int = sys.exc_info()[1].args[0]  # type: ignore[union-attr]  # uvicorn handles httptools' HttpParserUpgrade
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._data = b"\r\n".join([*lines, b"", self._data[num_read:]])
        self.parser = type(self.parser)(self)


class ClosingCycle(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunks. The end of the connection ends its body."""

    async def send(self, message: Any) -> None:
        self.expected_content_length = len(message.get("body", b""))  # any length is right
        await super().send(message)


class Server(uvicorn.Server):
    """uvicorn's server, with time limits. uvicorn would wait for its connections, and these for the engine.

    Its run(sockets) serves on bound sockets until a signal, and then shuts the AsyncLLM down.
    """

    def __init__(
        self,
        async_llm: AsyncLLM,
        settings: ServerSettings,
        *,
        shutdown_timeout: float,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """shutdown_timeout: the seconds that running requests have after a signal. ssl_context: for https. None: http."""
        config = uvicorn.Config(
            create_app(async_llm, settings),
            http=LimitedProtocol,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(shutdown_timeout + FLUSH_SECONDS),
            ssl_context_factory=None if ssl_context is None else lambda config, default: ssl_context,
        )
        super().__init__(config)
        self._log_level = logger.level
        logger.setLevel(logging.WARNING)  # until it has started: the banner says what uvicorn would say
        self._async_llm = async_llm
        self._settings = settings
        self._shutdown_timeout = shutdown_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if logger.level == logging.WARNING:  # nobody has set another one
            logger.setLevel(self._log_level)
        assert sockets, "they are bound before the model is loaded"
        url = url_of(sockets[0], is_https=self.config.is_ssl)
        for line in banner(self._async_llm, self._settings, url).splitlines():
            logger.info("%s", line)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = self._async_llm.shutdown(self._shutdown_timeout)
        await super().shutdown(sockets)
        if self.force_exit:
            closing.cancel()
            await self._async_llm.shutdown(0)
        else:
            await closing


def banner(async_llm: AsyncLLM, settings: ServerSettings, url: str) -> str:
    """Return the text that a server prints when it listens at this URL."""
    info, name = async_llm.llm.info, settings.served_model_name[0]
    num_cached, num_bytes = info.num_blocks * info.block_size, info.num_cache_bytes
    num_seqs = async_llm.engine.scheduler.config.max_num_seqs
    return (
        f"{name}: {info.dtype} on {info.device}, context {info.max_model_len:,} tokens, "
        f"KV cache {num_cached:,} tokens ({num_bytes / 2**20:,.0f} MiB), {num_seqs} sequences at a time\n"
        f"running on {url} (OpenAI's API at /v1, a web page at /); Ctrl-C ends it\n"
        f"requests without a seed draw theirs from --seed {async_llm.engine.seed}"
    )


def share_the_process() -> None:
    """Reduce the time that the engine's thread and the event loop's thread wait for each other."""
    gc.collect()
    gc.freeze()  # otherwise the collector now and then examines all of torch, while every stream waits about 0.2 s
    atexit.register(gc.unfreeze)  # so that modules are collected at exit. Otherwise Triton complains on stderr
    sys.setswitchinterval(SWITCH_INTERVAL)
