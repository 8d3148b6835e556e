"""The stream of one request, recorded with the time of every read, and parsed after the measurement.

In: a Client and a body. Out: the chunks of the answer, and when they arrived. The client may share its cores with the server
that it measures, so receiving must cost little: a read is one system call and one append to a list.
"""

import asyncio
import io
import time
from collections.abc import Iterator
from typing import Any

from nanoinfer.server.client import CONNECT_SECONDS, Client

MAX_READ_BYTES = 2**18  # asyncio reads no more at once


class TimedResponse(asyncio.Protocol):
    """What arrived at one connection.

    Attributes:
        reads: The time of each read, in seconds of perf_counter, and its bytes.
        error: Why nothing more arrived, if it was not the end of the answer.
    """

    def __init__(self) -> None:
        self.reads: list[tuple[float, bytes]] = []
        self.error: Exception | None = None
        self._has_ended = asyncio.Event()

    @classmethod
    async def of(cls, client: Client, path: str, body: dict[str, Any]) -> "TimedResponse":
        """Post a body on a connection of its own, and record until the server closes it."""
        response, loop = cls(), asyncio.get_running_loop()
        try:
            opening = loop.create_connection(lambda: response, client.host, client.port, ssl=client.tls)
            transport, _ = await asyncio.wait_for(opening, CONNECT_SECONDS)
        except OSError as error:
            response.error = client.no_connection(error)
            return response
        try:
            transport.write(client.stream_request(path, body))
            await response._wait(client.timeout)
        finally:
            transport.abort()
        return response

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.error = self.error or error
        self._has_ended.set()

    async def _wait(self, timeout: float | None) -> None:
        """Wait until the connection is closed, or until nothing has arrived for `timeout` seconds."""
        while not self._has_ended.is_set():
            num_reads = len(self.reads)
            try:
                await asyncio.wait_for(self._has_ended.wait(), timeout)
            except TimeoutError:
                if len(self.reads) == num_reads:
                    self.error = TimeoutError("timed out")
                    return

    def chunks(self, client: Client, path: str) -> Iterator[tuple[float, dict[str, Any]]]:
        """Parse the answer: (time, chunk). Raises: NanoinferError, as Client.stream does."""
        file = _RecordedFile(self.reads, self.error)
        for chunk in client.parse_stream(path, file):
            yield file.time, chunk


class _RecordedFile(io.RawIOBase):
    """Reads a response again, each time the bytes of one read. time: of the newest."""

    def __init__(self, reads: list[tuple[float, bytes]], error: Exception | None) -> None:
        self._reads, self._error = iter(reads), error
        self.time = 0.0

    def makefile(self, mode: str) -> io.BufferedReader:
        """As a socket's."""
        return io.BufferedReader(self, MAX_READ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.time, data = next(self._reads, (self.time, b""))
        if not data and self._error is not None:
            raise self._error
        buffer[: len(data)] = data
        return len(data)
