"""Measure an OpenAI-compatible server from outside, as its clients see it.

In: a Client and Workloads. Out: a Measurement of each. An event loop sends all requests and keeps what arrives, some 250 bytes
of memory per token, which is parsed when the last answer has ended. The client may share its cores with the server that it
measures, so receiving must cost little: a read is a system call and an append to a list.
"""

import asyncio
import io
import random
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.system.progress import progress_bar
from nanoinfer_lab.bench import timing as of_any_run
from nanoinfer_lab.bench.client import CONNECT_SECONDS, Client
from nanoinfer_lab.bench.timing import COUNTERS, Figures, Measurement, RequestTiming, Run
from nanoinfer_lab.bench.workloads import Workload

# Ids that nearly every vocabulary has: the bytes, or the first characters.
VOCAB_SIZE = 256
# Words that are single tokens of nearly every vocabulary, for endpoints that take no ids.
WORDS = "the of and to in is you that it he was for on are as with his they I at be this have from or one had by".split()
MAX_READ_BYTES = 2**18  # the most that asyncio reads at once


@dataclass(frozen=True, slots=True)
class ServeFigures(Figures):
    """The figures of a run. The latencies are those of the requests that did not fail."""

    num_failed: int
    failures: dict[str, int]  # message -> how often it occurred
    client_cpu_s: float  # the CPU time of this process, which may share the server's cores
    tokens_per_chunk: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how requests are sent."""

    client: Client
    model: str
    is_chat: bool = False  # send messages of words to /chat/completions, not token ids to /completions
    ignore_eos: bool = True  # continue after EOS, to have the workload's lengths. OpenAI's servers refuse the field
    max_concurrency: int | None = None  # maximum number of requests in flight

    def bodies(self, workload: Workload, run: int) -> list[dict[str, object]]:
        sampling = dict(workload.sampling)
        if not sampling["temperature"]:
            sampling = {"temperature": 0.0}  # other fields change nothing, and some servers refuse them
        common = {"model": self.model} | sampling | ({"ignore_eos": True} if self.ignore_eos else {})
        prompts = workload.prompts(len(WORDS) if self.is_chat else VOCAB_SIZE, run)
        return [common | self._prompt(ids) | {"max_tokens": n} for ids, n in zip(prompts, workload.output_lens, strict=True)]

    def _prompt(self, ids: list[int]) -> dict[str, object]:
        if not self.is_chat:
            return {"prompt": ids}
        return {"messages": [{"role": "user", "content": " ".join(WORDS[index] for index in ids)}]}


def measure(
    target: Target, workloads: list[Workload], goodput: dict[str, float], *, repeats: int
) -> list[Measurement[ServeFigures]]:
    """Send each workload `repeats` times. goodput: as in run(). Raises: the error of run()."""
    return [Measurement.of(workload, [run(target, workload, goodput) for _ in range(repeats)]) for workload in workloads]


def run(target: Target, workload: Workload, goodput: dict[str, float]) -> Run[ServeFigures]:
    """Send a request to warm up, and then the workload.

    Args:
        goodput: as in timing.figures().

    Raises:
        NanoinferError: the first request fails.
    """
    [warmup], _ = _measure(target, target.bodies(workload, run=0)[:1])
    if warmup.error is not None:
        raise NanoinferError(warmup.error)
    bodies = target.bodies(workload, run=random.getrandbits(32))  # the server's cache has no prompt of an earlier run
    before = _counters(target.client)
    timings, client_cpu_s = _measure(target, bodies, workload.arrivals)
    return Run.of(figures(timings, goodput, client_cpu_s=client_cpu_s), timings, before, _counters(target.client))


def _counters(client: Client) -> dict[str, int]:
    """Return those of COUNTERS that the server's /metrics has, summed over its engines. {}: it has no such page."""
    try:
        text = client.metrics()
    except NanoinferError:
        return {}
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^(?:vllm|nanoinfer):(\w+)_total(?:\{.*\})? (\S+)", text, re.MULTILINE):
        if name in COUNTERS:
            found[name] += int(float(value))
    return found


def _measure(
    target: Target, bodies: list[dict[str, object]], arrivals: Sequence[float] = ()
) -> tuple[list[RequestTiming], float]:
    """Send every request, wait for the answers, and parse them. Also returns the CPU seconds before the parsing."""
    path = "/chat/completions" if target.is_chat else "/completions"
    start = time.process_time()
    responses = asyncio.run(_record_all(target, path, bodies, arrivals or [0.0] * len(bodies)))
    cpu_s = time.process_time() - start
    return [_parse(target, path, sent, response) for sent, response in responses], cpu_s


async def _record_all(
    target: Target, path: str, bodies: list[dict[str, object]], arrivals: Sequence[float]
) -> "list[tuple[float, TimedResponse]]":
    """Send every request at its arrival time, or when another may be in flight. Returns (when it was sent, its answer)."""
    limit = asyncio.Semaphore(target.max_concurrency) if target.max_concurrency else nullcontext()
    start = time.perf_counter()

    async def record(body: dict[str, object], arrival: float) -> "tuple[float, TimedResponse]":
        await asyncio.sleep(start + arrival - time.perf_counter())
        async with limit:
            recorded = time.perf_counter(), await TimedResponse.of(target.client, path, body)
        bar.update()
        return recorded

    with progress_bar("requests", len(bodies)) as bar:
        return await asyncio.gather(*map(record, bodies, arrivals))


class TimedResponse(io.RawIOBase):
    """The bytes that arrived at a connection, which are read again like a socket's, one original read per call."""

    def __init__(self) -> None:
        self.reads: deque[tuple[float, bytes]] = deque()  # the time of each, in seconds of perf_counter, and its bytes
        self.error: Exception | None = None  # why nothing more arrived, if it was not the end of the answer
        self.time = 0.0  # that of the read that was read again last

    @classmethod
    async def of(cls, client: Client, path: str, body: dict[str, object]) -> "TimedResponse":
        """Post a body on a separate connection, and record until the server closes it."""
        response = cls()
        try:
            opening = asyncio.open_connection(client.host, client.port, ssl=client.tls)
            reader, writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
        except OSError as error:
            response.error = client.no_connection(error)
            return response
        try:
            writer.write(client.stream_request(path, body))
            async with asyncio.timeout(client.timeout) as limit:
                while data := await reader.read(MAX_READ_BYTES):
                    response.reads.append((time.perf_counter(), data))
                    limit.reschedule(client.timeout and asyncio.get_running_loop().time() + client.timeout)
        except OSError as error:
            response.error = TimeoutError("timed out") if isinstance(error, TimeoutError) else error
        finally:
            writer.transport.abort()
        return response

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a file, as a socket does."""
        return io.BufferedReader(self, MAX_READ_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.reads and self.error is not None:
            raise self.error
        self.time, data = self.reads.popleft() if self.reads else (self.time, b"")
        buffer[: len(data)] = data
        return len(data)


def _parse(target: Target, path: str, sent: float, response: TimedResponse) -> RequestTiming:
    timing = RequestTiming(sent)
    usage: dict[str, Any] = {}
    try:
        for chunk in target.client.parse_stream(path, response):
            choices = chunk.get("choices") or ()
            if any(_has_text(choice) for choice in choices):
                timing.token_times.append(response.time)
            for choice in choices:
                timing.finish_reason = choice.get("finish_reason") or timing.finish_reason
            usage = chunk.get("usage") or usage
        if "prompt_tokens" not in usage or "completion_tokens" not in usage:
            raise NanoinferError("the stream has no usage, so its tokens cannot be counted")
        timing.num_prompt_tokens, timing.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not timing.token_times:
            raise NanoinferError(
                f"the answer has no text, in {timing.num_output_tokens} tokens; does the model have a tokenizer?"
            )
    except NanoinferError as error:
        timing.error = str(error)
    return timing


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice  # of a chat, or a completion's choice itself
    return any(delta.get(name) for name in ("text", "content", "reasoning", "reasoning_content", "tool_calls"))


def figures(timings: list[RequestTiming], goodput: dict[str, float], *, client_cpu_s: float = 0.0) -> ServeFigures:
    """Compute the figures. goodput: as in timing.figures().

    >>> timing = RequestTiming(0.0, [0.5, 0.7, 1.0], num_prompt_tokens=3, num_output_tokens=6)
    >>> found = figures([timing, RequestTiming(0.0, error="refused")], {"ttft": 500.0})
    >>> found.tpot_ms.p50, found.output_tokens_per_s, found.tokens_per_chunk, found.goodput_requests_per_s, found.failures
    (100.0, 6.0, 2.0, 1.0, {'refused': 1})
    """
    common = of_any_run.figures(timings, goodput)
    good = [timing for timing in timings if timing.error is None]
    num_chunks = sum(len(timing.token_times) for timing in good)
    return ServeFigures(
        **{field.name: getattr(common, field.name) for field in fields(common)},
        num_failed=len(timings) - len(good),
        failures=dict(Counter(timing.error for timing in timings if timing.error is not None)),
        client_cpu_s=client_cpu_s,
        tokens_per_chunk=common.num_output_tokens / max(num_chunks, 1),
    )
