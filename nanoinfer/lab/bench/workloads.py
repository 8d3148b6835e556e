"""Workloads: standard ones by name, those that a user describes, and recorded ones.

In: a name, or lengths and a rate, or a file. Out: a Workload, which makes prompts of token ids and SamplingParams.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.errors import InvalidValueError, shown
from nanoinfer.sampling_params import SamplingParams

HASHED_TOKENS = 512  # the size of the block that a hash id of a recording names


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
    *, num_prompts: int, input_len: str, output_len: str, request_rate: float, sampling: dict[str, Any], seed: int
) -> Workload:
    """Make a workload from a description.

    Args:
        input_len, output_len: the number of tokens, as text: "128", or "16-256" to draw it uniformly.
        request_rate: the mean requests per second, at random times (a Poisson process). inf: all at once.
        sampling: the arguments of SamplingParams.
        seed: the seed of the lengths and the arrival times.

    Raises:
        InvalidValueError: a length has another format, or the rate is not above 0.
    """
    rng = random.Random(seed)
    if not request_rate > 0:
        raise InvalidValueError(f"request_rate must be > 0 requests per second, got {request_rate}; inf is all at once")
    inputs, outputs = _range("input_len", input_len), _range("output_len", output_len)
    now, arrivals = 0.0, []
    for _ in range(num_prompts):
        arrivals.append(now)
        now += 0.0 if math.isinf(request_rate) else rng.expovariate(request_rate)
    return Workload(
        name="yours",
        input_lens=tuple(rng.randint(*inputs) for _ in range(num_prompts)),
        output_lens=tuple(rng.randint(*outputs) for _ in range(num_prompts)),
        sampling=sampling,
        arrivals=() if math.isinf(request_rate) else tuple(arrivals),
    )


def recorded(path: Path, *, num_prompts: int | None = None, sampling: dict[str, Any]) -> Workload:
    """Read a recording in the format of Mooncake's traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).

    Each line is a JSON object: timestamp (arrival in milliseconds), input_length and output_length (tokens), and perhaps
    hash_ids, an id for each 512 tokens of the prompt. Prompts share the blocks of equal ids. Other fields are ignored.

    Args:
        path: the path of the recording.
        num_prompts: how many requests to read, from the first arrival on. None: all.
        sampling: the arguments of SamplingParams.

    Raises:
        InvalidValueError: the file cannot be read, or a line has another format.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"the recording {path} cannot be read ({error})") from error
    requests = sorted(_requests(path, lines), key=lambda request: request[0])[:num_prompts]
    if not requests:
        raise InvalidValueError(f"the recording {path} has no requests; each line is one, as JSON")
    timestamps, inputs, outputs, hash_ids = zip(*requests, strict=True)
    return Workload(
        name=path.stem,
        input_lens=inputs,
        output_lens=outputs,
        sampling=sampling,
        arrivals=tuple((timestamp - timestamps[0]) / 1e3 for timestamp in timestamps),
        hash_ids=hash_ids,
    )


def _requests(path: Path, lines: list[str]) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    """Yield the timestamp, lengths and hash ids of each line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            timestamp, *lengths = (row[name] for name in ("timestamp", "input_length", "output_length"))
            hash_ids = tuple(row.get("hash_ids") or ())
            is_right = 0 <= float(timestamp) < math.inf and all(type(length) is int and length >= 1 for length in lengths)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_right = False
        if not is_right or len(hash_ids) > -(-lengths[0] // HASHED_TOKENS):
            raise InvalidValueError(
                f"{path}, line {number}, must be such as "
                '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}, with milliseconds, '
                f"numbers of tokens >= 1 and at most one id for each {HASHED_TOKENS} tokens of input, got {shown(line)}"
            )
        yield float(timestamp), lengths[0], lengths[1], hash_ids


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise InvalidValueError(f"{name} must be a number of tokens such as 128, or a range such as 16-256, got {text!r}")
    return bounds
