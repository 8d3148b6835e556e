"""Several engines that share the requests: all alike, or some that compute prompts and send their blocks to others that decode.

A step that computes a prompt delays every token of the sequences that decode in it. Engines that only decode do not have such
steps, but they wait for the blocks of each prompt, and engines that only compute prompts leave their memory's bandwidth unused.

    prefill engine   | prompt of r0 | prompt of r1 |
    its link                        | blocks of r0 | blocks of r1 |
    decode engine                                  | r0 r0 r0 r0  | r0 r1 r0 r1 ...

Source: Zhong et al. 2024, "DistServe", https://arxiv.org/abs/2401.09670.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import partial

from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.int8_cache.sizes import stored_in
from nanoinfer_lab.simulate.costs import ModelSizes
from nanoinfer_lab.simulate.hardware import Hardware
from nanoinfer_lab.simulate.simulator import ANSWER_TOKEN_ID, Result, SimulatedRequest, Simulation

NewEngine = Callable[[], Simulation]


def simulate_engines(
    sizes: ModelSizes,
    hardware: Hardware,
    settings: EngineArgs,
    requests: Iterable[SimulatedRequest],
    *,
    num_engines: int,
    num_prefill_engines: int = 0,
) -> Result:
    """Simulate equal engines, which take the requests round-robin.

    Args:
        sizes, hardware, settings: those of each engine, as in simulate.
        requests: in the order of their arrivals.
        num_engines: how many engines there are.
        num_prefill_engines: how many of them compute prompts and the first token of each answer. The others do the rest, when
            the link of the prefill engine (hardware.link_bandwidth) has sent the keys and values, one prompt after another.
            0: each engine does both.

    Raises:
        InvalidValueError: as simulate does, or all engines are prefill engines, or the hardware has no link.
    """
    new_engine = partial(Simulation, sizes, hardware, settings)
    if num_engines == 1 and not num_prefill_engines:
        return new_engine().run(requests)
    given = list(requests)
    if not num_prefill_engines:
        return _in_turns(new_engine, num_engines, given)
    if not 0 < num_prefill_engines < num_engines:
        raise InvalidValueError(
            f"num_prefill_engines must be in 0 .. {num_engines - 1}, so that one of {num_engines} engines decodes, got "
            f"{num_prefill_engines}"
        )
    if not hardware.link_bandwidth:
        raise InvalidValueError(
            f"num_prefill_engines must be 0, because {hardware.name} has no link, got {num_prefill_engines}"
        )
    prefilled = _in_turns(new_engine, num_prefill_engines, [replace(one, output_len=1, max_tokens=1) for one in given])
    costs = new_engine().costs
    dtype = costs.cache_dtype or costs.dtype
    token_bytes = stored_in(sizes.cache, dtype).bytes_per_token(dtype)
    free_s = [0.0] * num_prefill_engines  # when the link of each engine has sent all before
    received: list[tuple[float, int]] = []  # when a decode engine has a request, and its number
    for number, timing in sorted(enumerate(prefilled.timings), key=lambda item: item[1].token_times[0]):
        num_bytes = len(given[number].prompt) * token_bytes + sizes.cache.bytes_per_state
        sent_s = hardware.link_latency_s + num_bytes / hardware.link_bandwidth
        engine = number % num_prefill_engines
        free_s[engine] = max(timing.token_times[0], free_s[engine]) + sent_s
        if given[number].output_len > 1:
            received.append((free_s[engine], number))
    received.sort()
    rests = [_rest_of(given[number], arrival_s) for arrival_s, number in received]
    decoded = _in_turns(new_engine, num_engines - num_prefill_engines, rests)
    return _joined(prefilled, decoded, [number for _, number in received])


def _in_turns(new_engine: NewEngine, num_engines: int, requests: ListLike[SimulatedRequest]) -> Result:
    """Let engines take requests round-robin. Returns what they have found together."""
    results = [new_engine().run(requests[first::num_engines]) for first in range(num_engines)]
    total = Result(num_blocks=results[0].num_blocks)
    total.timings = [results[number % num_engines].timings[number // num_engines] for number in range(len(requests))]
    for result in results:
        total.add(result)
    return total


def _rest_of(request: SimulatedRequest, arrival_s: float) -> SimulatedRequest:
    """Return the rest of a request, whose prompt and first token another engine has computed."""
    return replace(
        request,
        arrival_s=arrival_s,
        prompt=[*request.prompt, ANSWER_TOKEN_ID],
        output_len=request.output_len - 1,
        max_tokens=(request.max_tokens or request.output_len) - 1,
        num_received_tokens=len(request.prompt),
    )


def _joined(prefilled: Result, decoded: Result, numbers: ListLike[int]) -> Result:
    """Put the answers together. numbers: of each decoded request, its number among the prefilled ones."""
    for number, rest in zip(numbers, decoded.timings, strict=True):
        timing = prefilled.timings[number]
        prefilled.inter_token_s.add(rest.token_times[0] - timing.token_times[0])
        timing.token_times.append(rest.token_times[-1])
        timing.num_output_tokens += rest.num_output_tokens
    prefilled.add(decoded)
    return prefilled
