"""The cases of the tasks of bookkeeping: blocks, prefixes, chunks, preemption, the packed batch. They need no tensors."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from nanoinfer.config import SchedulerConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.prefix_index import PrefixIndex
from nanoinfer.scheduling.scheduler import Scheduler, Selection
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of
from nanoinfer_course.learn.check import Case
from nanoinfer_course.learn.workbook import Version

PARAMS = SamplingParams()  # making them checks all of their fields


def _sequence(token_ids: list[int], max_num_tokens: int = 1000, name: str = "r", cache_salt: str | None = None) -> Sequence:
    return Sequence(name, list(token_ids), PARAMS, seed=0, max_num_tokens=max_num_tokens, cache_salt=cache_salt)


def _grow(seq: Sequence, token_id: int) -> None:
    seq.token_ids.append(token_id)
    seq.num_tokens += 1


def _manager(name: str, version: Version, num_blocks: int, block_size: int, *, caching: bool = True) -> BlockManager:
    if name != "chain":
        made: BlockManager = type("Learners", (BlockManager,), {name: version})(num_blocks, block_size, caching)
        return made
    manager = BlockManager(num_blocks, block_size, caching)
    manager.index.__class__ = type("Learners", (PrefixIndex,), {name: version})
    return manager


def _compute(manager: BlockManager, seq: Sequence) -> list[tuple[int, int]]:
    """Allocate, "compute" and cache a sequence's new tokens, like a step."""
    num_tokens = seq.num_new_tokens
    copies = manager.allocate(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    manager.cache_finished_blocks(seq, seq.num_computed_tokens)
    return copies


def _replay(name: str, block_size: int, prompts: list[list[int]], version: Version, *, caching: bool) -> dict[str, object]:
    """Replay what _block_cases describes."""
    manager = _manager(name, version, 24, block_size, caching=caching)
    seen: dict[str, object] = {}
    alive = []
    for number, prompt in enumerate(prompts):
        seq = _sequence(prompt, cache_salt="salt" if number == 3 else None)
        seq.is_answered = number != 4
        prefix = manager.match_prefix(seq.token_ids, seq.cache_salt)
        seen[f"prompt {number}, cached blocks found"] = [block for _, block in prefix]
        manager.start(seq, prefix)
        seq.num_computed_tokens = len(prefix) * block_size
        seen[f"prompt {number}, result of allocate"] = _compute(manager, seq)
        seen[f"prompt {number}, block table"] = list(seq.block_table)
        seen[f"prompt {number}, number of prefix_keys"] = len(seq.prefix_keys)
        if number % 2:
            manager.free(seq)
        else:
            alive.append(seq)
    for parent in alive[-2:]:
        child = _sequence(parent.token_ids)
        manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        _grow(child, 7)
        seen["a fork, result of allocate"] = _compute(manager, child)
        seen["a fork, block table"] = list(child.block_table)
        alive.append(child)
    if alive:
        _grow(alive[-1], 8)
        seen["the last fork's next token, result of allocate"] = _compute(manager, alive[-1])
    seen["free blocks"] = manager.num_free_blocks
    for seq in alive:
        manager.free(seq)
    seen["free blocks after all have ended"] = manager.num_free_blocks
    return seen


def _block_cases(name: str) -> Iterator[Case]:
    """Yield prompts that come one after the other. Those of odd numbers end at once, and the last two others fork."""
    for seed in range(120):
        rng = random.Random(seed)
        block_size, letters, caching = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 2, 3]), seed % 10 != 9
        lengths = [rng.randint(1, 3 * block_size) for _ in range(min(1 + seed // 4, 6))]
        prompts = [[rng.randrange(letters) for _ in range(length)] for length in lengths]
        rows = []
        for number, prompt in enumerate(prompts):
            blocks = [" ".join(map(str, prompt[i : i + block_size])) for i in range(0, len(prompt), block_size)]
            note = {1: "ends", 3: "cache_salt='salt', ends", 4: "is only read", 5: "ends"}.get(number, "")
            rows.append(
                f"  prompt {number}  | {' | '.join(block.ljust(2 * block_size - 1) for block in blocks)} |  {note}".rstrip()
            )
        picture = "\n".join(
            [
                "Each prompt in turn is looked up, computed in its blocks, and cached:",
                *rows,
                "Of those that have not ended, the last two fork: the same blocks, and",
                "one more token. The last fork then gets another token.",
            ]
        )
        replay = partial(_replay, name, block_size, prompts, caching=caching)
        yield Case({"block_size": block_size, "enable_prefix_caching": caching}, replay, picture=picture)


def _pool_cases(name: str) -> Iterator[Case]:
    """Yield a whole scheduler with random requests in few blocks, with token ids instead of a model."""
    for seed in range(40):
        rng = random.Random(seed)
        block_size, size = rng.choice([1, 2, 4]), 1 + seed // 7
        sizes = {"num_blocks": rng.randint(6, 12), "block_size": block_size, "enable_prefix_caching": seed % 5 != 4}
        most = sizes["num_blocks"] * block_size
        given = {
            "chunk_size": rng.choice([2, 4, 8]),
            "max_num_seqs": rng.randint(1, 4),
            "max_num_batched_tokens": rng.choice([4, 8]),
        }
        requests = []
        for _ in range(min(size, 6)):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, most - 2))]
            end = min(len(prompt) + rng.randint(1, 6), most)
            requests.append((rng.randrange(2 * size), prompt, end, rng.random() < 0.2 and 2 * end < most))
        rows = [
            f"  request {number} arrives in step {arrival}: {prompt}, ends with {end} tokens{', with a fork' * has_fork}"
            for number, (arrival, prompt, end, has_fork) in enumerate(requests)
        ]
        simulation = partial(_simulate, name, sizes, given, requests, seed)
        picture = "\n".join(["Whole steps of the scheduler:", *rows])
        yield Case({**sizes, **given}, simulation, picture=picture, comes_last=True)


def _simulate(
    name: str,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    requests: list[tuple[int, list[int], int, bool]],
    seed: int,
    version: Version,
) -> dict[str, object]:
    rng = random.Random(seed)
    manager = BlockManager(**sizes)
    scheduler: Scheduler = type("Learners", (Scheduler,), {name: version})(SchedulerConfig(**settings), manager)
    seen: dict[str, object] = {}
    unfinished: list[Sequence] = []
    for step in range(400):
        for number, (arrival, prompt, end, has_fork) in enumerate(requests):
            if arrival == step:
                seq = _sequence(prompt, end, str(number))
                seq.forks = [Sequence(str(number), list(prompt), seq.params, 0, end, index=1)] if has_fork else []
                unfinished += [seq, *seq.forks]
                scheduler.add(seq)
        plan = scheduler.schedule()
        seen |= {
            f"step {step}, what runs, and tokens": [
                (item.sequence.sequence_id, item.num_new_tokens) for item in plan.scheduled
            ],
            f"step {step}, what waits": [seq.sequence_id for seq in scheduler.waiting],
            f"step {step}, cached tokens": [item.sequence.num_computed_tokens for item in plan.scheduled],
            f"step {step}, block tables": [list(item.sequence.block_table) for item in plan.scheduled],
        }
        scheduler.commit(plan)
        for seq, _ in plan.rows:
            scheduler.append(seq, rng.randrange(2))
            if len(seq.token_ids) >= seq.max_num_tokens:
                scheduler.finish(seq)
                unfinished.remove(seq)
        if not unfinished and step > max(arrival for arrival, *_ in requests):
            break
    return {**seen, "unfinished": len(unfinished), "free blocks at the end": manager.num_free_blocks}


def _scheduler(name: str, version: Version, seed: int) -> tuple[Scheduler, random.Random]:
    """Return a scheduler with running sequences, some decoding and some prefilling, in blocks of 2."""
    rng = random.Random(seed)
    config = SchedulerConfig(max_num_batched_tokens=16, chunk_size=rng.choice([2, 4, 8]))
    scheduler: Scheduler = type("Learners", (Scheduler,), {name: version})(config, BlockManager(8, 2))
    for number in range(1 + seed // 20):
        seq = _sequence([rng.randrange(9) for _ in range(rng.randint(2, 9))], name=str(number))
        num_computed = rng.choice([len(seq.token_ids) - 1, rng.randrange(len(seq.token_ids))])
        if not scheduler.block_manager.can_allocate(seq, num_computed):
            break
        scheduler.block_manager.allocate(seq, num_computed)
        seq.num_computed_tokens, seq.status = num_computed, SequenceStatus.RUNNING
        if rng.random() < 0.3 and num_computed == len(seq.token_ids) - 1:  # its newest token is still being sampled
            seq.num_computed_tokens, seq.num_tokens = len(seq.token_ids), len(seq.token_ids) + 1
            seq.max_num_tokens = seq.num_tokens + rng.choice([0, 5])
        scheduler.running.append(seq)
    return scheduler, rng


def _described(scheduler: Scheduler) -> str:
    rows = [
        f"  {seq.request_id}: {seq.num_computed_tokens} of {seq.num_tokens} tokens computed, "
        f"{seq.num_tokens - len(seq.token_ids)} in flight, max {seq.max_num_tokens}, blocks {seq.block_table}"
        for seq in scheduler.running
    ]
    return "\n".join(
        [
            f"{scheduler.block_manager.num_free_blocks} blocks of 2 tokens are free. The running requests, the oldest first:",
            *rows,
        ]
    )


def _effects(scheduler: Scheduler, selection: Selection) -> dict[str, object]:
    return {
        "what runs, and tokens": [(item.sequence.request_id, item.num_new_tokens) for item in selection.scheduled],
        "selection.budget": selection.budget,
        "selection.preempted": [seq.request_id for seq in selection.preempted],
        "self.running": [(seq.request_id, seq.status.name) for seq in scheduler.running],
        "self.waiting": [seq.request_id for seq in scheduler.waiting],
        "free blocks": scheduler.block_manager.num_free_blocks,
    }


def _running_cases(name: str) -> Iterator[Case]:
    """Yield cases of scheduling what already runs, in a pool that is nearly full."""

    def observe(version: Version, seed: int, budget: int) -> object:
        scheduler, _ = _scheduler(name, version, seed)
        scheduler.choose_victim = lambda running, seq: running[-1 - seed % 2] if len(running) > 1 else seq  # type: ignore[method-assign]
        selection = Selection(budget)
        scheduler._continue_running(selection)
        return _effects(scheduler, selection)

    for seed in range(100):
        before, rng = _scheduler("make", print, seed)
        budget = rng.randint(1, 16)
        given = {
            "selection.budget": budget,
            "self.config.chunk_grid": before.config.chunk_grid,
            "choose_victim returns": f"running[{-1 - seed % 2}]",
        }
        observed = partial(observe, seed=seed, budget=budget)
        yield Case(given, observed, picture=f"self._continue_running(selection). {_described(before)}")
    yield from _pool_cases(name)


def _start_cases() -> Iterator[Case]:
    """Yield cases of starting one sequence, whose beginning may be cached."""

    def prepared(version: Version, seed: int) -> tuple[Scheduler, Sequence, list[int], dict[str, int]]:
        scheduler, rng = _scheduler("_start", version, seed % 60)
        cached = _sequence([rng.randrange(9) for _ in range(rng.randint(1, 5))])
        if scheduler.block_manager.can_allocate(cached, len(cached.token_ids)):
            _compute(scheduler.block_manager, cached)
            scheduler.block_manager.free(cached)
        seq = _sequence(
            cached.token_ids[: rng.randint(0, 5)] + [rng.randrange(9) for _ in range(rng.randint(1, 4))], name="new"
        )
        return (
            scheduler,
            seq,
            cached.token_ids,
            {"selection.num_kept_free": rng.randint(0, 2), "selection.budget": rng.choice([0, 1, 2, 4, 8])},
        )

    def observe(version: Version, seed: int) -> object:
        scheduler, seq, _, numbers = prepared(version, seed)
        selection = Selection(numbers["selection.budget"], numbers["selection.num_kept_free"])
        return {
            "result": version(scheduler, selection, seq),
            **_effects(scheduler, selection),
            "seq.block_table": list(seq.block_table),
            "seq.num_computed_tokens": seq.num_computed_tokens,
            "selection.num_kept_free": selection.num_kept_free,
        }

    for seed in range(100):
        scheduler, seq, cached, numbers = prepared(print, seed)
        given = {"seq.token_ids": seq.token_ids, **numbers}
        given |= {"self.config.chunk_grid": scheduler.config.chunk_grid, "tokens of a cached prompt": cached}
        yield Case(given, partial(observe, seed=seed), picture=_described(scheduler))
    yield from _pool_cases("_start")


def _chunk_cases() -> Iterator[Case]:
    def observe(version: Version, grid: int, num_tokens: int, start: int) -> object:
        config = SchedulerConfig(max_num_batched_tokens=16, chunk_size=grid)
        return version(Scheduler(config, BlockManager(8, 4)), _sequence(list(range(num_tokens))), start)

    for grid in (1, 2, 4, 5):
        for num_tokens in range(1, 12):
            for start in range(num_tokens):
                given = {"self.config.chunk_grid": grid, "seq.num_tokens": num_tokens, "start": start}
                picture = "".join("|" * (i % grid == 0) + (">" if i == start else "-") for i in range(num_tokens)) + "|"
                observed = partial(observe, grid=grid, num_tokens=num_tokens, start=start)
                yield Case(given, observed, picture=f"| the grid, > the start of the chunk:  {picture}")


def _pack_cases() -> Iterator[Case]:
    def plan(seed: int) -> tuple[StepPlan, int]:
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4])
        items = []
        for number in range(1 + seed // 20):
            seq = _sequence([rng.randrange(100) for _ in range(rng.randint(1, 9))], name=str(number))
            seq.block_table = rng.sample(range(40), 13 // block_size)
            is_decode = rng.random() < 0.5
            seq.num_computed_tokens = len(seq.token_ids) - 1 if is_decode else rng.randrange(len(seq.token_ids))
            num_new = 1 if is_decode else rng.randint(1, seq.num_new_tokens)
            drafts = tuple(rng.randrange(100) for _ in range(rng.randint(0, 3))) if is_decode else ()
            items.append(ScheduledSequence(seq, num_new, drafts))
        if seed % 3 == 0:  # the last token of the first sequence is still being sampled by the step before
            first = items[0].sequence
            first.num_computed_tokens, first.num_tokens = len(first.token_ids), len(first.token_ids) + 1
            items[0] = ScheduledSequence(first, 1)
        return StepPlan(scheduled=tuple(items), rows=rows_of(items)), block_size

    def observe(version: Version, seed: int) -> object:
        packed = version(*plan(seed))
        return {**packed._asdict(), "sequences": [seq.sequence_id for seq in packed.sequences]}

    for seed in range(100):
        step, block_size = plan(seed)
        rows = ["plan.scheduled:"]
        for item in step.scheduled:
            seq = item.sequence
            rows += [
                f"  request {seq.request_id}: token_ids {seq.token_ids}, num_tokens {seq.num_tokens}, num_computed_tokens "
                f"{seq.num_computed_tokens},",
                f"      num_new_tokens {item.num_new_tokens}, draft_token_ids {list(item.draft_token_ids)},",
                f"      block_table {seq.block_table}",
            ]
        yield Case({"block_size": block_size}, partial(observe, seed=seed), picture="\n".join(rows))


def _slice_cases() -> Iterator[Case]:
    def judge(total: int, slices: list[slice]) -> object:
        """Return the rows that the slices cover, in order, and whether their lengths differ by at most 1."""
        parts = [range(total)[part] for part in slices]
        lengths = [*map(len, parts)]
        return [row for part in parts for row in part], max(lengths) - min(lengths) <= 1

    for size in (1, 2, 3, 4):
        for total in range(size, 14):

            def observe(version: Version, total: int = total, size: int = size) -> object:
                return [version(total, rank, size) for rank in range(size)]

            yield Case({"total": total, "size": size, "rank": f"0 .. {size - 1}"}, observe, judge=partial(judge, total))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "column_slice": _slice_cases,
    "match_prefix": partial(_block_cases, "chain"),
    "allocate": partial(_block_cases, "allocate"),
    "cache_blocks": partial(_block_cases, "cache_finished_blocks"),
    "next_chunk": _chunk_cases,
    "make_room": partial(_running_cases, "_make_room"),
    "continue_running": partial(_running_cases, "_continue_running"),
    "start": _start_cases,
    "pack": _pack_cases,
}
