"""Workloads: standard ones by name, those that a user describes, and recorded ones.

In: a name, or lengths and a rate, or a file. Out: a Workload, which makes prompts of token ids and SamplingParams.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanoinfer.errors import InvalidValueError, check_number, out_of_range, shown
from nanoinfer.sampling_params import SamplingParams

HASHED_TOKENS = 512  # the size of the block that a hash id of a recording names
MOST_HASHED = 2**20  # hash ids of a session, more than any prompt has
AZURE_COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"

Row = tuple[float, int, int, tuple[int, ...]]  # a request: its arrival in ms, input and output length, hash ids


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of given lengths. EOS is ignored, so that the answers have these lengths."""

    name: str
    input_lens: tuple[int, ...]  # the tokens of each request
    output_lens: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})  # arguments of SamplingParams
    arrivals: tuple[float, ...] = ()  # seconds after the start, ascending. (): all requests arrive at the start
    hash_ids: tuple[tuple[int, ...], ...] = ()  # per request, an id for each HASHED_TOKENS tokens of the prompt

    @property
    def num_tokens(self) -> list[int]:
        """The tokens of each request, prompt and answer together."""
        return [i + o for i, o in zip(self.input_lens, self.output_lens, strict=True)]

    def prompts(self, vocab_size: int, run: int) -> list[list[int]]:
        """Return random ids, different in every run of every workload, so that no prefix of an earlier run is in the cache."""
        rng = random.Random(f"{self.name} {run}")
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in self.input_lens]
        for prompt, hash_ids in zip(prompts, self.hash_ids, strict=False):
            for index, hash_id in enumerate(hash_ids):
                block = slice(index * HASHED_TOKENS, min((index + 1) * HASHED_TOKENS, len(prompt)))
                of_block = random.Random(f"{self.name} {run} {hash_id}")
                prompt[block] = [of_block.randrange(vocab_size) for _ in range(block.start, block.stop)]
        return prompts

    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **self.sampling) for length in self.output_lens
        ]


def _mixed(name: str, num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int]) -> Workload:
    rng = random.Random(0)
    lens = [(rng.randint(*input_len), rng.randint(*output_len)) for _ in range(num_requests)]
    return Workload(name=name, input_lens=tuple(i for i, _ in lens), output_lens=tuple(o for _, o in lens))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="A", input_lens=(32,), output_lens=(128,)),  # a single stream
        Workload(name="B16", input_lens=(64,) * 16, output_lens=(64,) * 16),
        Workload(name="B64", input_lens=(64,) * 64, output_lens=(64,) * 64),
        Workload(name="C", input_lens=(1023,), output_lens=(1,)),  # only prefill: the figure is the TTFT
        _mixed("D", 32, (16, 256), (16, 128)),  # nano-vllm's benchmark, scaled down
        Workload(
            name="E",  # sampled
            input_lens=(1,) * 64,
            output_lens=(128,) * 64,
            sampling={"temperature": 1.0, "top_k": 40, "top_p": 0.9},
        ),
        _mixed("F", 256, (100, 1024), (100, 1024)),  # nano-vllm's benchmark, for a GPU: hours on a CPU
    )
}


def named(names: str) -> list[Workload]:
    """Look up a list such as "A,B16". Raises: InvalidValueError if a name is unknown."""
    for name in (picked := names.split(",")):
        if name not in WORKLOADS:
            raise InvalidValueError(f"workload must be some of {', '.join(WORKLOADS)}, with commas between them, got {name!r}")
    return [WORKLOADS[name] for name in picked]


def described(
    *,
    num_prompts: int,
    input_len: str,
    output_len: str,
    request_rate: float,
    burstiness: float = 1.0,
    turns: int = 1,
    think_time: float = 10.0,
    sampling: dict[str, Any],
    seed: int,
) -> Workload:
    """Make a workload from a description.

    Args:
        input_len, output_len: the number of tokens, as text: "128", or "16-256" to draw it uniformly.
        request_rate: the mean requests per second, at random times. inf: all at once.
        burstiness: the shape of the gamma distribution of the times between arrivals, as in vLLM. 1: a Poisson process. Below
            1, requests come in bursts.
        turns: the requests of a session. The prompt of each repeats the session's tokens so far, and adds input_len.
        think_time: the mean seconds between two requests of a session, an exponential distribution.
        sampling: the arguments of SamplingParams.
        seed: the seed of the lengths and the arrival times.

    Raises:
        InvalidValueError: a length has another format, a number is out of its range, or burstiness or think_time has no effect.
    """
    rng = random.Random(seed)
    if not request_rate > 0:
        raise out_of_range("request_rate", request_rate, "> 0 requests per second; inf is all at once")
    check_number("burstiness", burstiness, math.ulp(0.0), math.inf, "finite and > 0")
    check_number("think_time", think_time, math.ulp(0.0), math.inf, "finite and > 0 seconds")
    if math.isinf(request_rate) and burstiness != 1.0:
        raise InvalidValueError(
            f"burstiness must be 1 with request_rate inf, got {burstiness}; leave burstiness out, or give a request_rate"
        )
    if turns == 1 and think_time != 10.0:
        raise InvalidValueError(f"turns must be > 1 with think_time {think_time}, got 1; leave think_time out, or raise turns")
    inputs, outputs = _range("input_len", input_len), _range("output_len", output_len)
    start, rows = 0.0, list[Row]()
    for session in range(-(-num_prompts // turns)):
        arrival, length = start, 0
        for _ in range(turns):
            length, output_length = length + rng.randint(*inputs), rng.randint(*outputs)
            first = session * MOST_HASHED
            hash_ids = range(first, first - (-length // HASHED_TOKENS)) if turns > 1 else ()
            rows.append((arrival, length, output_length, tuple(hash_ids)))
            arrival, length = arrival + 1e3 * rng.expovariate(1 / think_time), length + output_length
        start += 0.0 if math.isinf(request_rate) else rng.gammavariate(burstiness, 1e3 * turns / (request_rate * burstiness))
    return _workload("yours", rows, num_prompts, sampling)


def recorded(path: Path, *, num_prompts: int | None = None, sampling: dict[str, Any]) -> Workload:
    """Read a recording in the format of Mooncake's traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces), or
    of Azure's (https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace).

    Mooncake: each line is a JSON object: timestamp (arrival in milliseconds), input_length and output_length (tokens), and
    perhaps hash_ids, an id for each 512 tokens of the prompt. Prompts share the blocks of equal ids. Other fields are ignored.

    Azure: a CSV file with the columns TIMESTAMP (a date and a time), ContextTokens and GeneratedTokens.

    Args:
        path: the path of the recording.
        num_prompts: how many requests to read, from the first arrival on. None: all.
        sampling: the arguments of SamplingParams.

    Raises:
        InvalidValueError: the file cannot be read, or a line has another format.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"the recording {path} cannot be read ({error})") from error
    rows = list(_rows(path, lines))
    if not rows:
        raise InvalidValueError(f"the recording {path} has no requests; each line is one, as JSON")
    return _workload(path.stem, rows, num_prompts, sampling)


def _workload(name: str, rows: Iterable[Row], num_prompts: int | None, sampling: dict[str, Any]) -> Workload:
    """Make a workload of the first requests, which start with the first arrival."""
    first = sorted(rows, key=lambda row: row[0])[:num_prompts]
    times, inputs, outputs, hash_ids = zip(*first, strict=True)
    return Workload(
        name=name,
        input_lens=inputs,
        output_lens=outputs,
        sampling=sampling,
        arrivals=tuple((time - times[0]) / 1e3 for time in times) if times[-1] > times[0] else (),
        hash_ids=hash_ids if any(hash_ids) else (),
    )


def _rows(path: Path, lines: list[str]) -> Iterator[Row]:
    is_azure = bool(lines) and lines[0] == AZURE_COLUMNS
    read, example = (_azure_row, AZURE_EXAMPLE) if is_azure else (_mooncake_row, MOONCAKE_EXAMPLE)
    for number, line in enumerate(lines[is_azure:], start=1 + is_azure):
        if not line.strip():
            continue
        try:
            row = time, *lengths, hash_ids = read(line)
            is_right = 0 <= time < math.inf and all(type(length) is int and length >= 1 for length in lengths)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_right = False
        if not is_right or len(hash_ids) > -(-lengths[0] // HASHED_TOKENS):
            raise InvalidValueError(f"{path}, line {number}, must be such as {example}, got {shown(line)}")
        yield row


MOONCAKE_EXAMPLE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}, with milliseconds, '
    f"numbers of tokens >= 1 and at most one id for each {HASHED_TOKENS} tokens of input"
)
AZURE_EXAMPLE = "2023-11-16 18:17:03.9799600,4808,10, with a date, a time and numbers of tokens >= 1"


def _mooncake_row(line: str) -> Row:
    row = json.loads(line)
    return float(row["timestamp"]), row["input_length"], row["output_length"], tuple(row.get("hash_ids") or ())


def _azure_row(line: str) -> Row:
    time, input_length, output_length = line.split(",")
    return datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp() * 1e3, int(input_length), int(output_length), ()


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise InvalidValueError(f"{name} must be a number of tokens such as 128, or a range such as 16-256, got {text!r}")
    return bounds
