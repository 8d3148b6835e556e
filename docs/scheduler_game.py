"""Play the scheduler game: the engine's scheduler and block manager on six traces, with every choice that a player has.

`python docs/scheduler_game.py` prints the best and the worst choices for each trace. The site shows the outcomes
(scheduler_game.md), so its browser schedules nothing. No model runs: after each step the clock advances by what such a step
takes, a line through GPT-2's figures in BENCHMARKS.md. Seeds are fixed, so the outcomes are the same everywhere.
"""

import random
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from nanoinfer.config import SchedulerConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.policies import DeadlineScheduler, PriorityScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence

BLOCK_SIZE = 16


# ---- what a step takes


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step: fixed + per_row * (sequences that decode) + per_token * (prompt tokens)."""

    fixed: float
    per_row: float
    per_token: float

    def __call__(self, num_rows: int, num_prompt_tokens: int) -> float:
        return self.fixed + self.per_row * num_rows + self.per_token * num_prompt_tokens


def read_cost() -> Cost:
    """The line through workloads A (one stream), B64 (64 streams) and C (a prompt) of GPT-2 in bfloat16."""
    page = Path(__file__).parents[1].joinpath("BENCHMARKS.md").read_text(encoding="utf-8")
    first = {name: re.search(rf"\| GPT-2, bfloat16 \| {name} \| [\d.]+ \(([\d,]+)", page) for name in ("A", "B64", "C")}
    rate_1, rate_64, prompt_ms = (float(first[name][1].replace(",", "")) for name in ("A", "B64", "C"))  # type: ignore[index]
    per_token = prompt_ms / 1023
    one = (128 / rate_1 * 1000 - 32 * per_token) / 128  # 32 tokens in, 128 out
    many = (64 * 64 / rate_64 * 1000 - 64 * 64 * per_token) / 64  # 64 streams of 64 in, 64 out
    per_row = (many - one) / 63
    return Cost(one - per_row, per_row, per_token)


# ---- what a player chooses


class LateLastScheduler(DeadlineScheduler):
    """The earliest deadline first, but what has missed its deadline waits until nothing else does."""

    now = 0.0

    def order_waiting(self, waiting: deque[Sequence]) -> list[Sequence]:
        return sorted(waiting, key=lambda seq: (seq.deadline < self.now, seq.deadline))


ORDERS = {
    "first come, first served": Scheduler,
    "lowest priority number": PriorityScheduler,
    "earliest deadline": DeadlineScheduler,
    "earliest deadline, late ones last": LateLastScheduler,
}
CHUNKS = (64, 256, 1024)  # prompt tokens in a step
RESERVES = ("nothing", "one more block", "the longest answer")
AT_ONCE = (4, 8, 16)  # sequences
Choice = tuple[str, int, str, int]
CHOICES: list[Choice] = list(product(ORDERS, CHUNKS, RESERVES, AT_ONCE))
USUAL: Choice = ("first come, first served", 1024, "one more block", 16)  # what the engine does
QUESTIONS = {
    "Who starts first?": tuple(ORDERS),
    "Prompt tokens in a step, at most": CHUNKS,
    "Free blocks kept for those that run": RESERVES,
    "Sequences at once, at most": AT_ONCE,
}


def make_scheduler(choice: Choice, num_blocks: int) -> Scheduler:
    order, chunk, reserve, at_once = choice

    class Chosen(ORDERS[order]):  # type: ignore[misc]
        def num_reserved_blocks(self, seq: Sequence) -> int:
            if reserve == "one more block":
                return super().num_reserved_blocks(seq)
            longest = self.block_manager.num_blocks_for(seq.max_num_tokens - 1) - len(seq.block_table)
            return longest if reserve == "the longest answer" else 0

    config = SchedulerConfig(max_num_seqs=at_once, max_num_batched_tokens=chunk, chunk_size=chunk)
    return Chosen(config, BlockManager(num_blocks, BLOCK_SIZE))


# ---- the traces


@dataclass(frozen=True)
class Request:
    """arrival in ms, lengths in tokens. The answer ends after num_output tokens, at most max_tokens, which the engine knows."""

    arrival: float
    prompt: tuple[int, ...]
    num_output: int
    max_tokens: int
    first_ms: int  # the limit for the first token
    pause_ms: int  # the limit for the longest time between two tokens
    priority: int = 0


@dataclass(frozen=True)
class Trace:
    name: str
    words: str
    num_blocks: int
    requests: list[Request]


def prompt(rng: random.Random, num: int, shared: tuple[int, ...] = ()) -> tuple[int, ...]:
    return shared + tuple(rng.randrange(1000, 50_000) for _ in range(num))


def chats(
    seed: int,
    num: int,
    every: float,
    *,
    first_ms: int = 250,
    pause_ms: int = 60,
    prompts: tuple[int, int] = (30, 120),
    outputs: tuple[int, int] = (16, 48),
    shared: tuple[int, ...] = (),
) -> list[Request]:
    """Requests that arrive at random, one in `every` ms on average, the first at once."""
    rng, found, at = random.Random(seed), [], 0.0
    for _ in range(num):
        ids = prompt(rng, rng.randint(*prompts), shared)
        found.append(Request(at, ids, rng.randint(*outputs), 64, first_ms, pause_ms))
        at += rng.expovariate(1 / every)
    return found


def by_arrival(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda one: one.arrival)


def make_traces() -> list[Trace]:
    rng = random.Random(0)
    documents = [Request(at, prompt(rng, 900), 24, 64, 1200, 100) for at in (100.0, 350.0, 600.0)]
    jobs = [Request(5.0 * i, prompt(rng, 400), 60, 64, 4000, 400, 1) for i in range(6)]
    small = {"prompts": (30, 70), "outputs": (40, 64)}
    system = tuple(range(400))
    return [
        Trace("Fast readers", "Chats. Nobody should wait 40 ms between two tokens.", 400, chats(1, 14, 45, pause_ms=40)),
        Trace("Three documents", "Chats, and three prompts of 900 tokens.", 600, by_arrival([*chats(4, 10, 70), *documents])),
        Trace("Little memory", "Long answers.", 36, chats(4, 14, 25, first_ms=500, pause_ms=50, **small)),
        Trace("One system prompt", "All begin with the same 400 tokens.", 150, chats(8, 14, 20, first_ms=300, shared=system)),
        Trace(
            "Chats and jobs", "Six jobs of priority 1 may take seconds. Chats have priority 0.", 120, [*jobs, *chats(2, 10, 60)]
        ),
        Trace("Overload", "More chats than the machine can serve in time.", 70, chats(4, 30, 12, first_ms=300)),
    ]


# ---- a run


WAITS, READS, WRITES, ENDS = range(4)


@dataclass
class Story:
    """What happened to a request: spans are (ms, whether it WAITS, READS its prompt, WRITES or ENDS from then on)."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # when each came


def play(trace: Trace, choice: Choice, cost: Cost) -> dict[str, Any]:
    """Run a trace to its end. Returns the goodput, and what happened."""
    scheduler = make_scheduler(choice, trace.num_blocks)
    stories = [Story() for _ in trace.requests]
    arriving = deque(enumerate(trace.requests))
    now, num_preemptions, num_at_once = 0.0, 0, 0

    def enter(index: int, kind: int) -> None:
        spans = stories[index].spans
        if spans[-1][0] == round(now):  # it lasted no time
            spans.pop()
        if not spans or spans[-1][1] != kind:
            spans.append((round(now), kind))

    while arriving or scheduler.num_unfinished:
        if not scheduler.num_unfinished:
            now = max(now, arriving[0][1].arrival)
        while arriving and arriving[0][1].arrival <= now:
            index, one = arriving.popleft()
            stories[index].spans.append((round(one.arrival), WAITS))
            scheduler.add(
                Sequence(
                    str(index),
                    list(one.prompt),
                    SamplingParams(max_tokens=one.max_tokens),
                    seed=0,
                    max_num_tokens=len(one.prompt) + one.max_tokens,
                    priority=one.priority,
                    arrival_time=one.arrival,
                    deadline=one.arrival + one.first_ms,
                )
            )
        scheduler.now = now  # type: ignore[attr-defined]
        plan = scheduler.schedule()
        for seq in plan.preempted:
            enter(int(seq.request_id), WAITS)
        for item in plan.scheduled:
            enter(int(item.sequence.request_id), READS if item.num_new_tokens > 1 else WRITES)
        num_preemptions += len(plan.preempted)
        num_at_once = max(num_at_once, len(plan.scheduled))
        scheduler.commit(plan)
        now += cost(plan.num_decode_tokens, plan.num_prefill_tokens) if plan.scheduled else 0
        for seq, _ in plan.rows:
            index = int(seq.request_id)
            scheduler.append(seq, seq.num_output_tokens)
            stories[index].tokens.append(now)
            enter(index, WRITES)
            if seq.num_output_tokens == trace.requests[index].num_output:
                enter(index, ENDS)
                scheduler.finish(seq)
    assert scheduler.block_manager.num_free_blocks == trace.num_blocks
    outcomes: list[tuple[int, int, list[tuple[int, int]]]] = []
    for one, story in zip(trace.requests, stories, strict=True):
        first = story.tokens[0] - one.arrival
        pause = max((b - a for a, b in zip(story.tokens, story.tokens[1:], strict=False)), default=0.0)
        outcomes.append((round(first), round(pause), story.spans))
    num_good = sum(
        first <= one.first_ms and pause <= one.pause_ms for (first, pause, _), one in zip(outcomes, trace.requests, strict=True)
    )
    return {
        "goodput": round(num_good / now * 1000, 2),
        "good": num_good,
        "ms": round(now),
        "preemptions": num_preemptions,
        "atOnce": num_at_once,
        "requests": outcomes,
    }


def game_data() -> dict[str, Any]:
    """Every outcome of every trace. Choices that lead to the same events share one."""
    cost, traces = read_cost(), []
    for trace in make_traces():
        outcomes: list[dict[str, Any]] = []
        of = []
        for choice in CHOICES:
            outcome = play(trace, choice, cost)
            if outcome not in outcomes:
                outcomes.append(outcome)
            of.append(outcomes.index(outcome))
        requests = [[round(r.arrival), len(r.prompt), r.num_output, r.first_ms, r.pause_ms, r.priority] for r in trace.requests]
        facts = {"name": trace.name, "words": trace.words, "blocks": trace.num_blocks}
        traces.append({**facts, "requests": requests, "of": of, "outcomes": outcomes})
    questions = [{"label": label, "values": values} for label, values in QUESTIONS.items()]
    usual = [values.index(value) for values, value in zip(QUESTIONS.values(), USUAL, strict=True)]
    return {"choices": questions, "usual": usual, "limits": {"blockSize": BLOCK_SIZE}, "traces": traces}


def main() -> None:
    print(read_cost())
    for trace in game_data()["traces"]:
        goodputs = [trace["outcomes"][index]["goodput"] for index in trace["of"]]
        best = max(goodputs)
        num_best = goodputs.count(best)
        print(f"{trace['name']}: the engine's choice {goodputs[CHOICES.index(USUAL)]}, the worst {min(goodputs)}")
        print(f"    the best {best}, with {num_best} of {len(CHOICES)} choices, such as {CHOICES[goodputs.index(best)]}")


if __name__ == "__main__":
    main()
