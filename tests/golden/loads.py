"""The 2,000 random loads whose plans are golden: settings of an engine, and requests that arrive, end and are aborted.

In: a load's name, such as "windows/17". Out: a Load, which is the same on every machine and in every version of Python. For
this a load draws only from Random.random(), whose numbers Python promises, and never from a hash, a set's order or a clock.

Each kind of load has one feature in all of its loads, and every other feature that goes with it in some of them.
"""

import random
from dataclasses import dataclass, field

KINDS = {  # kind -> how many loads
    "fcfs": 200, "priority": 200, "deadline": 150, "forks": 200, "beams": 100, "failures": 150, "windows": 250, "states": 200,
    "store": 150, "drafts": 200, "async": 100, "adapters": 100,
}  # fmt: skip
NAMES = [f"{kind}/{number}" for kind, num_loads in KINDS.items() for number in range(num_loads)]

EOS, VOCAB_SIZE = 0, 12
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Arrival:
    """A request, or a beam search if beam_width is not 0.

    step: the call of step() before which it arrives. abort_step: the one before which it is aborted, or None.
    reads_prompt: whether log-probabilities of the prompt are requested. is_read: whether its prompt is read and not answered.
    fails_at: the number of output tokens after which its row has an error instead of a token, or None.
    """

    step: int
    prompt: list[int]
    seed: int
    max_tokens: int
    n: int = 1
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    adapter: int | None = None
    beam_width: int = 0
    reads_prompt: bool = False
    is_read: bool = False
    ignore_eos: bool = False
    abort_step: int | None = None
    fails_at: int | None = None


@dataclass(frozen=True)
class Load:
    """What one engine, or with a store two engines after one another, are asked for.

    policy: of scheduling/policies.py, or "eager" and "patient", which override methods of the Scheduler.
    evicts: the block that choose_evicted returns: the "first" candidate, as the package does, or the "last" one.
    store_blocks: the size of the store, or 0 for none. num_slots: for states, or 0 for none.
    failing_steps: the launches that raise. reset_steps: the calls of step() before which the prefix cache is emptied.
    """

    name: str
    seed: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    budget: int
    chunk_size: int
    chunked: bool
    prefix_caching: bool
    policy: str = "fcfs"
    evicts: str = "first"
    windows: tuple[int | None, ...] = (None,)
    num_slots: int = 0
    store_blocks: int = 0
    num_drafts: int = 0
    is_async: bool = False
    max_loras: int = 0
    failing_steps: tuple[int, ...] = ()
    reset_steps: tuple[int, ...] = ()
    arrivals: list[Arrival] = field(default_factory=list)


class Draws:
    """Draws that depend on a name only."""

    def __init__(self, name: str):
        self._random = random.Random(name).random

    def below(self, end: int) -> int:
        return int(self._random() * end)

    def within(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def one_of(self, *choices):
        return choices[self.below(len(choices))]

    def happens(self, probability: float) -> bool:
        return self._random() < probability


def mixed(*numbers: int) -> int:
    """Return 64 bits that depend on all the numbers (the finalizer of splitmix64, after each of them)."""
    bits = 0
    for number in numbers:
        bits = (bits + number + 0x9E3779B97F4A7C15) & _MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        bits ^= bits >> 31
    return bits


def token_at(seed: int, position: int) -> int:
    """Return the token that is sampled at a position by a sequence's seed, whatever ran before. One of 40 is EOS."""
    bits = mixed(seed, position)
    return EOS if bits % 40 == 0 else 1 + bits // 40 % (VOCAB_SIZE - 1)


def make_load(name: str) -> Load:
    """Return the load of this name. Raises: ValueError if there is none."""
    kind, _, number = name.partition("/")
    if kind not in KINDS or not number.isdigit() or int(number) >= KINDS[kind]:
        raise ValueError(f"there is no load {name!r}; the first and the last are {NAMES[0]} and {NAMES[-1]}")
    draws = Draws(name)
    settings = _sizes(draws) | _features(kind, draws)
    if settings["windows"] != (None,):  # the longest sequence must fit alone, and there is a table for each window
        needed = _most_blocks(settings)
        settings["num_blocks"] = needed + draws.one_of(0, 0, 1, 2, needed // 2, needed)
    if settings["num_slots"]:  # a step of forks needs a slot for each, and one more for each that parts from it
        settings["num_slots"] = settings["max_num_seqs"] + draws.within(1, settings["max_num_seqs"])
    return Load(name=name, seed=draws.below(2**32), **settings, arrivals=_arrivals(kind, settings, draws))


def _sizes(draws: Draws) -> dict:
    block_size, max_model_len = draws.one_of(1, 2, 3, 4, 4, 8), draws.within(20, 56)
    needed = -(-max_model_len // block_size)
    chunked = draws.happens(0.85)
    return {
        "block_size": block_size,
        "num_blocks": needed + draws.one_of(0, 0, 1, 2, needed // 2, needed, 3 * needed),
        "max_model_len": max_model_len,
        "max_num_seqs": draws.one_of(1, 2, 3, 4, 4, 6, 8),
        "budget": draws.one_of(4, 7, 16, 64) if chunked else max_model_len + draws.below(8),
        "chunk_size": draws.one_of(3, 4, 5, 8, 16, 1024),
        "chunked": chunked,
        "prefix_caching": draws.happens(0.9),
    }


def _features(kind: str, draws: Draws) -> dict:
    """The feature of the kind, and some of those that go with it."""
    features = {
        "policy": kind if kind in ("priority", "deadline") else draws.one_of("fcfs", "fcfs", "priority", "deadline"),
        "evicts": "last" if draws.happens(0.1) else "first",
        "windows": (None,),
        "num_slots": int(kind == "states"),
        "is_async": kind == "async" or (kind != "drafts" and draws.happens(0.15)),
        "max_loras": draws.within(1, 2) if kind == "adapters" else 0,
    }
    if kind == "fcfs":
        features["policy"] = draws.one_of("fcfs", "fcfs", "fcfs", "fcfs", "eager", "patient")
    if kind == "windows" or (kind in ("beams", "drafts") and draws.happens(0.2)):
        features["windows"] = draws.one_of((3,), (8,), (None, 4), (None, 12), (5, None), (2, None, 9), (24, 6))
    elif kind == "drafts" and draws.happens(0.25):
        features["num_slots"] = 1
    if kind == "store":
        features |= {"store_blocks": draws.one_of(3, 10, 100), "prefix_caching": True}
    if kind == "drafts":
        features["num_drafts"] = draws.within(1, 5)
    if kind == "failures":
        steps = [draws.below(40) for _ in range(6)]
        features |= {"failing_steps": tuple(sorted(steps[:3])), "reset_steps": tuple(sorted(steps[3:]))}
    return features


def _most_blocks(settings: dict) -> int:
    """The blocks of the longest sequence, which in a window is at most the window, a chunk, and the blocks where they begin."""
    size, length, budget = settings["block_size"], settings["max_model_len"], settings["budget"]
    chunk = min(settings["chunk_size"], budget) if settings["chunked"] else budget
    return sum(-(-(length if window is None else min(length, window + chunk + size)) // size) for window in settings["windows"])


def _arrivals(kind: str, settings: dict, draws: Draws) -> list[Arrival]:
    """Requests whose prompts often begin as an earlier prompt, or as an earlier prompt with its answer."""
    arrivals: list[Arrival] = []
    texts: list[list[int]] = []
    step = 0
    for _ in range(draws.within(6, 16)):
        step += draws.one_of(0, 0, 1, 2, 4, 8)
        if kind == "beams" and draws.happens(0.3):
            prompt = _prompt(draws, texts, settings["max_model_len"])
            width = draws.within(1, 3)
            arrivals.append(Arrival(step, prompt, draws.below(2**32), draws.within(1, 8), beam_width=width))
        else:
            arrivals.append(_arrival(kind, settings, draws, step, texts))
            seed, prompt = arrivals[-1].seed, arrivals[-1].prompt
            answer = [token_at(seed, i) for i in range(len(prompt), len(prompt) + arrivals[-1].max_tokens)]
            texts.append([*prompt, *answer])
    return arrivals


def _arrival(kind: str, settings: dict, draws: Draws, step: int, texts: list[list[int]]) -> Arrival:
    is_short = draws.happens(0.2)
    return Arrival(
        step,
        prompt=_prompt(draws, texts, settings["max_model_len"]),
        seed=draws.below(2**32),
        max_tokens=1 if is_short else draws.within(2, 24),
        n=draws.within(2, 4) if kind == "forks" or draws.happens(0.06) else 1,
        priority=draws.within(-1, 2) if settings["policy"] == "priority" else 0,
        # The gaps are far longer than a load takes, so that the clock decides only between equals, as the arrival does.
        timeout=draws.one_of(None, 10_000.0, 20_000.0, 30_000.0) if settings["policy"] == "deadline" else None,
        cache_salt=draws.one_of("a", "b") if draws.happens(0.05) else None,
        adapter=draws.one_of(None, 0, 1, 2, 3) if settings["max_loras"] else None,
        reads_prompt=draws.happens(0.05),
        is_read=draws.happens(0.04),
        ignore_eos=draws.happens(0.5),
        abort_step=step + draws.within(1, 12) if draws.happens(0.25 if kind == "failures" else 0.06) else None,
        fails_at=draws.below(4) if kind == "failures" and draws.happens(0.2) else None,
    )


def _prompt(draws: Draws, texts: list[list[int]], max_model_len: int) -> list[int]:
    shared: list[int] = []
    if texts and draws.happens(0.7):
        earlier = texts[-1 - draws.below(min(len(texts), 4))]
        shared = earlier if draws.happens(0.5) else earlier[: draws.within(0, len(earlier))]
    num_own = max(draws.one_of(0, 1, 2, draws.within(1, 24)), 0 if shared else 1)
    own = [1 + draws.below(VOCAB_SIZE - 1) for _ in range(num_own)]
    return [*shared, *own][: max_model_len - draws.within(1, 4)]
