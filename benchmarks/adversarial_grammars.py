"""A client's stream of 400 tokens beside 16 clients that repeat adversarial grammars, and beside 16 ordinary clients,
interleaved.

    python -m benchmarks.adversarial_grammars

Each adversarial grammar is cheap for its first 70 characters, so that the trial passes it. The clients repeat their requests
without pause, also those that are refused. Exit code 1 if a bar is missed: the stream's time, its longest gap, the memory.
"""

import argparse
import asyncio
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_RATIO, MAX_GAP, MAX_PEAK, MAX_LEFT = 1.5, 0.3, 600, 100  # of the ordinary time, seconds, MB, MB 5 s after the end
PREFIX = "A" * 70


def _object(value: object) -> dict[str, object]:
    return {"type": "object", "properties": {PREFIX: value}, "required": [PREFIX], "additionalProperties": False}


def _pattern(letters: str, length: int) -> dict[str, str]:
    return {"type": "string", "pattern": f"^([a-z ]*[{letters}][a-z ]{{{length}}})+$"}


ADVERSARIAL: list[dict[str, Any]] = [
    {"grammar": f'start: "{PREFIX}" x\nx: "a" | x x | "a" x "a" | x x x'},  # rows of many items
    {"grammar": f'start: "{PREFIX}" s\ns: s s s s | "a" | "b" s | "a" s "b" | '},  # ambiguous, with empty alternatives
    {"grammar": f'start: "{PREFIX}" T\nT: ' + " & ".join(f"/(.*{c}.{{{n}}}{c})*.*/" for n, c in enumerate("abcdefghij", 10))},
    {"regex": f"{PREFIX}(([a-z ]{{1,40}}[aeiou ]){{1,40}}[a-z ]*[ts][a-z ]{{30}}){{1,40}}"},  # nested repetitions
    {"json": _object({"type": "array", "items": {"anyOf": [_pattern(c, 14) for c in ("ab", "cd", "ef", "gh")]}})},
]
ORDINARY: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {name: {"type": "string"} for name in ("name", "city", "text")},
              "required": ["name", "city", "text"], "additionalProperties": False}},
    {"regex": "[A-Z][a-z ,]{200,400}\\."},
    {"grammar": 'start: line+\nline: /[a-z ]+/ ("," | ".") " "'},
]  # fmt: skip


@dataclass
class Load:
    """What one turn showed. seconds: of the stream. statuses: of the 16 clients' requests."""

    seconds: float = 0.0
    gap: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)


class Client:
    """A connection that is kept, with as little work as possible for each request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: dict[str, Any], load: Load | None = None) -> int:
        """Return the status. load: takes the longest gap between the parts of a stream."""
        if self._streams is None or self._streams[1].is_closing():
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        content = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if "content-length" in headers:
            await reader.readexactly(int(headers["content-length"]))
        else:
            last = time.perf_counter()
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
                now = time.perf_counter()
                if load is not None:
                    load.gap = max(load.gap, now - last)
                last = now
            await reader.readline()
        if headers.get("connection") == "close":
            writer.close()
        return int(lines[0].split()[1])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def measure(port: int, formats: list[dict[str, Any]], *, clients: int, tokens: int, seconds: float) -> Load:
    """Run the clients, and streams one after the other, for at least some seconds. Returns the medians of the streams."""
    load, found = Load(), list[float]()

    async def repeat(answer_format: dict[str, Any]) -> None:
        client = Client(port)
        try:
            for seed in itertools.count():
                body = {"prompt": "Once", "structured_outputs": answer_format, "seed": seed}
                load.statuses[await client.post(body | {"min_tokens": tokens, "max_tokens": tokens})] += 1
        finally:
            client.close()

    others = [asyncio.create_task(repeat(formats[i % len(formats)])) for i in range(clients)]
    client, start = Client(port), time.perf_counter()
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "seed": 0, "stream": True}
    while not found or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        assert await client.post(body, load) == 200
        found.append(time.perf_counter() - before)
    client.close()
    for other in others:
        other.cancel()
    for result in await asyncio.gather(*others, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError("a client failed") from result if isinstance(result, BaseException) else None
    load.seconds = max(found)  # the first meets grammars that are not yet known
    return load


def memory(pid: int, name: str = "VmRSS") -> int:
    """Return the memory of a process and of its helpers in MB. name: VmHWM is the peak since reset_peak."""
    total, pids = 0, [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())]
    for one in pids:
        status = Path(f"/proc/{one}/status").read_text(encoding="ascii")
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith(name)), 0)
    return total >> 10


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


async def run(port: int, pid: int, *, rounds: int, kind: int | None, **options: Any) -> bool:
    """Print a line for each bar. Returns whether all are met."""
    adversarial = ADVERSARIAL if kind is None else [ADVERSARIAL[kind]]
    while True:
        try:
            status = await Client(port).post({"prompt": "Once", "max_tokens": 8})
            assert status == 200
            break
        except OSError:
            await asyncio.sleep(0.2)
    await measure(port, ORDINARY, **options | {"seconds": 0})
    await asyncio.sleep(5)
    before = memory(pid)
    by_kind: dict[str, list[Load]] = {"ordinary": [], "adversarial": []}
    peak = left = 0
    for _ in range(rounds):
        for name, formats in (("ordinary", ORDINARY), ("adversarial", adversarial)):
            reset_peak(pid)
            by_kind[name].append(load := await measure(port, formats, **options))
            print(f"{name:8} {load.seconds:6.2f} s, longest gap {load.gap:.3f} s, statuses {dict(load.statuses)}")
            if name == "adversarial":
                peak = max(peak, memory(pid, "VmHWM") - before)
            await asyncio.sleep(5)
            left = max(left, memory(pid) - before)
    medians = {name: statistics.median(load.seconds for load in loads) for name, loads in by_kind.items()}
    figures = (
        ("times the ordinary seconds", medians["adversarial"] / medians["ordinary"], MAX_RATIO),
        ("s: longest gap", max(load.gap for load in by_kind["adversarial"]), MAX_GAP),
        ("MB more at the peak", peak, MAX_PEAK),
        ("MB more 5 s after", left, MAX_LEFT),
    )
    for words, figure, bar in figures:
        print(f"{figure:8.2f} {words}, at most {bar}: {'met' if figure <= bar else 'MISSED'}")
    return all(figure <= bar for _, figure, bar in figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--kind", type=int, help="the number of the only adversarial grammar")
    for name, default in (("clients", 16), ("tokens", 400), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=10.0, help="the least length of a turn")
    args = vars(parser.parse_args())
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "nanoinfer", "serve", args.pop("model"), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return 0 if asyncio.run(run(port, server.pid, **args)) else 1
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
