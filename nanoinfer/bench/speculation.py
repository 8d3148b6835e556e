"""`nanoinfer bench speculation`: generating with drafts beside generating without, in turns, on one engine.

Random weights do not copy text. How predictable an answer is comes from allowed_token_ids: with one id every draft is right,
with two ids about half of the guessed tokens are, and among all ids nothing repeats. The first case is an upper bound of what
copied or lightly edited text gains, the last one is the price that all other text pays.
"""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.bench.runners import NanoinferRunner
from nanoinfer.bench.timing import figures
from nanoinfer.bench.workloads import Workload
from nanoinfer.llm import LLM
from nanoinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanoinfer.speculative.speculator import Proposer

PROMPT_LEN, OUTPUT_LEN = 64, 192
# (name, allowed_token_ids, number of requests, the least ratio, or None)
CASES = (
    ("1 stream, repeating", [5], 1, 2.0),
    ("1 stream, two ids", [5, 6], 1, None),
    ("1 stream, random", None, 1, 0.97),
    ("64 streams, repeating", [5], 64, 0.98),
    ("64 streams, random", None, 64, 0.98),
)


@dataclass(frozen=True, slots=True)
class Result:
    """plain, drafting: output tokens per second, the medians of the runs. bar: the least ratio, or None.

    drafted, accepted: draft tokens of all runs. propose_us: the time of one proposal for one sequence, in microseconds.
    """

    name: str
    plain: float
    drafting: float
    bar: float | None
    drafted: int
    accepted: int
    propose_us: float

    @property
    def ratio(self) -> float:
        return self.drafting / self.plain


def run(llm: LLM, repeats: int) -> list[Result]:
    """Measure every case, `repeats` times with and without drafts.

    llm: made with speculative_config.
    """
    return [_case(llm, repeats, name, allowed, num, bar) for name, allowed, num, bar in CASES]


def _case(llm: LLM, repeats: int, name: str, allowed: list[int] | None, num_requests: int, bar: float | None) -> Result:
    engine, runner = llm.engine, NanoinferRunner(llm)
    speculator = engine.speculator
    assert speculator is not None
    workload = Workload(
        name=name,
        input_lens=(PROMPT_LEN,) * num_requests,
        output_lens=(OUTPUT_LEN,) * num_requests,
        sampling={"temperature": 1.0, "seed": 0, "allowed_token_ids": allowed},
    )
    speeds: dict[bool, list[float]] = {False: [], True: []}
    num_prompt_tokens = PROMPT_LEN * num_requests
    before = (speculator.metrics.num_draft_tokens, speculator.metrics.num_accepted_tokens)
    speculator.proposer = timed = _TimedProposer(proposer := speculator.proposer)
    try:
        for repeat in range(repeats + 1):
            for is_drafting in (False, True):
                engine.speculator = speculator if is_drafting else None
                speed = figures(runner.run(workload, repeat), num_prompt_tokens).output_tokens_per_s
                if repeat:  # the first run warms up
                    speeds[is_drafting].append(speed)
    finally:
        engine.speculator = speculator
        speculator.proposer = proposer
    drafted, accepted = speculator.metrics.num_draft_tokens - before[0], speculator.metrics.num_accepted_tokens - before[1]
    plain, drafting = (statistics.median(speeds[is_drafting]) for is_drafting in (False, True))
    return Result(name, plain, drafting, bar, drafted, accepted, 1e6 * timed.seconds / max(timed.num_proposals, 1))


class _TimedProposer:
    """Another proposer, and how long it takes."""

    def __init__(self, proposer: "Proposer") -> None:
        self.seconds, self.num_proposals = 0.0, 0
        self._proposer = proposer
        self.forget = proposer.forget

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        start = time.perf_counter()
        drafts = self._proposer.propose(sequences, limits)
        self.seconds += time.perf_counter() - start
        self.num_proposals += len(sequences)
        return drafts
