"""Play the scheduler game: the engine's scheduler and block manager on six traces, with every choice that a player has.

`python docs/scheduler_game.py` prints the best and the worst choices for each trace. The site shows the outcomes
(scheduler_game.md), so its browser schedules nothing. No model runs: `nanoinfer simulate` says how long each step takes. Seeds
are fixed, so the outcomes are the same everywhere.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from nanoinfer.config import EngineArgs
from nanoinfer.scheduling.policies import DeadlineScheduler, PriorityScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer_lab.simulate.costs import FORMATS, ModelSizes
from nanoinfer_lab.simulate.hardware import HARDWARE
from nanoinfer_lab.simulate.simulator import SimulatedRequest, simulate

BLOCK_SIZE = 16
DTYPE = "bfloat16"
GPT2 = ModelSizes.of(
    {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
)
MACHINE = HARDWARE["laptop"]


# ---- what a player chooses


class LateLastScheduler(DeadlineScheduler):
    """The earliest deadline first, but what has missed its deadline waits until nothing else does."""

    def order_waiting(self, waiting: deque[Sequence]) -> list[Sequence]:
        return sorted(waiting, key=lambda seq: (seq.deadline < self.clock(), seq.deadline))


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


def settings_of(choice: Choice, num_blocks: int) -> EngineArgs:
    order, chunk, reserve, at_once = choice

    class Chosen(ORDERS[order]):  # type: ignore[misc]
        def num_reserved_blocks(self, seq: Sequence) -> int:
            if reserve == "one more block":
                return super().num_reserved_blocks(seq)
            longest = self.block_manager.num_blocks_for(seq.max_num_tokens - 1) - len(seq.block_table)
            return longest if reserve == "the longest answer" else 0

    return EngineArgs(
        dtype=DTYPE,
        block_size=BLOCK_SIZE,
        kv_cache_memory=num_blocks * GPT2.cache.bytes_per_block(BLOCK_SIZE, FORMATS[DTYPE]),
        max_num_seqs=at_once,
        max_num_batched_tokens=chunk,
        chunk_size=chunk,
        scheduler_cls=Chosen,
    )


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
    first_ms: int = 125,
    pause_ms: int = 30,
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
    documents = [Request(at, prompt(rng, 900), 24, 64, 600, 50) for at in (50.0, 175.0, 300.0)]
    jobs = [Request(2.5 * i, prompt(rng, 400), 60, 64, 2000, 200, 1) for i in range(6)]
    small = {"prompts": (30, 70), "outputs": (40, 64)}
    system = tuple(range(400))
    return [
        Trace("Fast readers", "Chats. Nobody should wait 15 ms between two tokens.", 400, chats(1, 14, 22, pause_ms=15)),
        Trace("Three documents", "Chats, and three prompts of 900 tokens.", 600, by_arrival([*chats(4, 10, 35), *documents])),
        Trace("Little memory", "Long answers.", 36, chats(4, 14, 12, first_ms=250, pause_ms=20, **small)),
        Trace("One system prompt", "All begin with the same 400 tokens.", 150, chats(8, 14, 10, first_ms=150, shared=system)),
        Trace(
            "Chats and jobs",
            "Six jobs of priority 1 may take seconds. Chats have priority 0.",
            120,
            by_arrival([*jobs, *chats(2, 10, 30)]),
        ),
        Trace("Overload", "More chats than the machine can serve in time.", 70, chats(4, 30, 6, first_ms=150)),
    ]


# ---- a run


WAITS, READS, WRITES, ENDS = range(4)


@dataclass
class Story:
    """What happened to a request: spans are (ms, whether it WAITS, READS its prompt, WRITES or ENDS from then on)."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # when each came

    def enter(self, ms: float, kind: int) -> None:
        if self.spans and self.spans[-1][0] == round(ms):  # it lasted no time
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != kind:
            self.spans.append((round(ms), kind))


def play(trace: Trace, choice: Choice) -> dict[str, Any]:
    """Run a trace to its end. Returns the goodput, and what happened."""
    stories = [Story([(round(one.arrival), WAITS)]) for one in trace.requests]
    num_at_once, started = 0, set[Sequence]()

    def on_step(plan: StepPlan, start_s: float, end_s: float) -> None:
        nonlocal num_at_once
        num_at_once = max(num_at_once, len(plan.scheduled))
        for seq in [seq for seq in started if seq.status is SequenceStatus.WAITING]:  # it was preempted
            stories[int(seq.request_id)].enter(start_s * 1e3, WAITS)
        started.update(item.sequence for item in plan.scheduled)
        for item in plan.scheduled:
            stories[int(item.sequence.request_id)].enter(start_s * 1e3, READS if item.num_new_tokens > 1 else WRITES)
        for seq, _ in plan.rows:
            story, index = stories[int(seq.request_id)], int(seq.request_id)
            story.tokens.append(end_s * 1e3)
            story.enter(end_s * 1e3, ENDS if len(story.tokens) == trace.requests[index].num_output else WRITES)

    requests = [
        SimulatedRequest(
            arrival_s=one.arrival / 1e3,
            prompt=list(one.prompt),
            output_len=one.num_output,
            max_tokens=one.max_tokens,
            priority=one.priority,
            deadline_s=(one.arrival + one.first_ms) / 1e3,
        )
        for one in trace.requests
    ]
    result = simulate(GPT2, MACHINE, settings_of(choice, trace.num_blocks), requests, on_step=on_step)
    outcomes: list[tuple[int, int, list[tuple[int, int]]]] = []
    for one, story in zip(trace.requests, stories, strict=True):
        first = story.tokens[0] - one.arrival
        pause = max((b - a for a, b in zip(story.tokens, story.tokens[1:], strict=False)), default=0.0)
        outcomes.append((round(first), round(pause), story.spans))
    num_good = sum(
        first <= one.first_ms and pause <= one.pause_ms for (first, pause, _), one in zip(outcomes, trace.requests, strict=True)
    )
    return {
        "goodput": round(num_good / result.end_s, 2),
        "good": num_good,
        "ms": round(result.end_s * 1e3),
        "preemptions": result.counts["num_preemptions"],
        "atOnce": num_at_once,
        "requests": outcomes,
    }


def game_data() -> dict[str, Any]:
    """Every outcome of every trace. Choices that lead to the same events share one."""
    traces = []
    for trace in make_traces():
        outcomes: list[dict[str, Any]] = []
        of = []
        for choice in CHOICES:
            outcome = play(trace, choice)
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
    for trace in game_data()["traces"]:
        goodputs = [trace["outcomes"][index]["goodput"] for index in trace["of"]]
        best = max(goodputs)
        num_best = goodputs.count(best)
        print(f"{trace['name']}: the engine's choice {goodputs[CHOICES.index(USUAL)]}, the worst {min(goodputs)}")
        print(f"    the best {best}, with {num_best} of {len(CHOICES)} choices, such as {CHOICES[goodputs.index(best)]}")


if __name__ == "__main__":
    main()
