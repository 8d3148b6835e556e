"""Workloads: the standard ones by name, and those that a user describes.

In: a name, or lengths and a rate. Out: a Workload, which makes prompts of token ids and SamplingParams.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.errors import InvalidValueError
from nanoinfer.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of given lengths. EOS is ignored, so that answers have these lengths."""

    name: str
    input_lens: tuple[int, ...]  # tokens of each request
    output_lens: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})  # arguments of SamplingParams
    arrivals: tuple[float, ...] = ()  # seconds after the start, ascending. () means that all requests arrive at the start

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each request, prompt and answer together."""
        return [i + o for i, o in zip(self.input_lens, self.output_lens, strict=True)]

    def prompts(self, vocab_size: int, run: int) -> list[list[int]]:
        """Random ids, different in every run of every workload, so that no prefix is in the cache."""
        rng = random.Random(f"{self.name} {run}")
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in self.input_lens]

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
        Workload(name="A", input_lens=(32,), output_lens=(128,)),  # one stream
        Workload(name="B16", input_lens=(64,) * 16, output_lens=(64,) * 16),
        Workload(name="B64", input_lens=(64,) * 64, output_lens=(64,) * 64),
        Workload(name="C", input_lens=(1023,), output_lens=(1,)),  # prefill alone: the figure is the TTFT
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
    """Look up a list like "A,B16". Raises: InvalidValueError, if a name is unknown."""
    for name in (picked := names.split(",")):
        if name not in WORKLOADS:
            raise InvalidValueError(f"workload must be some of {', '.join(WORKLOADS)}, with commas between them, got {name!r}")
    return [WORKLOADS[name] for name in picked]


def described(
    *, num_prompts: int, input_len: str, output_len: str, request_rate: float, sampling: dict[str, Any], seed: int
) -> Workload:
    """Make a workload from a description.

    Args:
        input_len, output_len: tokens per prompt and per answer, "128", or drawn uniformly from "16-256".
        request_rate: mean requests per second, at random times (a Poisson process). inf means all at once.
        sampling: arguments of SamplingParams.
        seed: of the lengths and the arrival times.

    Raises:
        InvalidValueError: a length is no such text, or the rate is not above 0.
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


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise InvalidValueError(f"{name} must be a number of tokens such as 128, or a range such as 16-256, got {text!r}")
    return bounds
