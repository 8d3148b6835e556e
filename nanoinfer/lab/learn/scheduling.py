"""The tasks of bookkeeping: blocks, prefixes, chunks, preemption, and the packed batch."""

import random
from collections.abc import Iterator
from functools import partial

import torch

from nanoinfer.config import SchedulerConfig
from nanoinfer.execution import forward_batch
from nanoinfer.lab.learn.check import Case, Task
from nanoinfer.lab.learn.workbook import Function, Version
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.prefix_index import PrefixIndex
from nanoinfer.scheduling.scheduler import Scheduler, _Selection
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of

_BLOCKS = "nanoinfer.scheduling.block_manager"
_SCHEDULER = "nanoinfer.scheduling.scheduler"


def _sequence(token_ids: list[int], max_num_tokens: int = 1000, name: str = "r", cache_salt: str | None = None) -> Sequence:
    return Sequence(name, list(token_ids), SamplingParams(), seed=0, max_num_tokens=max_num_tokens, cache_salt=cache_salt)


def _manager(name: str, version: Version, num_blocks: int, block_size: int, *, caching: bool = True) -> BlockManager:
    if name != "chain":
        made: BlockManager = type("Learners", (BlockManager,), {name: version})(num_blocks, block_size, caching)
        return made
    manager = BlockManager(num_blocks, block_size, caching)
    manager.index.__class__ = type("Learners", (PrefixIndex,), {name: version})
    return manager


def _compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> list[tuple[int, int]]:
    """Allocate, "compute" and cache a sequence's next tokens, like a step."""
    num_tokens = seq.num_new_tokens if num_tokens is None else num_tokens
    copies = manager.allocate(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    manager.cache_finished_blocks(seq, seq.num_computed_tokens)
    return copies


def _replay(
    name: str, block_size: int, prompts: list[list[int]], version: Version, *, caching: bool = True
) -> dict[str, object]:
    """Replay prompts one after the other, every fifth with a salt. Every second sequence ends, and the last two fork."""
    manager = _manager(name, version, 24, block_size, caching=caching)
    seen: dict[str, object] = {}
    alive = []
    for number, prompt in enumerate(prompts):
        seq = _sequence(prompt, cache_salt="salt" if number % 5 == 3 else None)
        prefix = manager.match_prefix(seq.token_ids, seq.cache_salt)
        seen[f"prompt {number}: blocks found"] = [block for _, block in prefix]
        manager.start(seq, prefix)
        seq.num_computed_tokens = len(prefix) * block_size
        _compute(manager, seq)
        seen[f"prompt {number}: block table"] = list(seq.block_table)
        seen[f"prompt {number}: number of keys"] = len(seq.prefix_keys)
        if number % 2:
            manager.free(seq)
            seen[f"prompt {number}: after free"] = (seq.block_table, seq.prefix_keys)
        else:
            alive.append(seq)
    for parent in alive[-2:]:
        child = _sequence(parent.token_ids)
        manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        child.token_ids.append(7)
        seen["fork: copies"] = _compute(manager, child)
        seen["fork: block table"] = list(child.block_table)
        alive.append(child)
    seen["free blocks"] = manager.num_free_blocks
    for seq in alive:
        manager.free(seq)
    seen["free blocks at the end"] = manager.num_free_blocks
    return seen


def _prompts(seed: int) -> tuple[int, list[list[int]]]:
    rng = random.Random(seed)
    block_size, letters = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 2, 3])
    return block_size, [
        [rng.randrange(letters) for _ in range(rng.randint(1, 3 * block_size))] for _ in range(min(1 + seed // 4, 6))
    ]


def _block_cases(name: str) -> Iterator[Case]:
    for seed in range(120):
        block_size, prompts = _prompts(seed)
        caching = seed % 10 != 9
        given = f"blocks of {block_size}, prompts {prompts}" + ("" if caching else ", prefix caching off")
        yield Case(given, partial(_replay, name, block_size, prompts, caching=caching))


def _simulate(name: str, seed: int, version: Version) -> dict[str, object]:
    """Run a whole scheduler on random requests in few blocks, with token ids instead of a model."""
    rng = random.Random(seed)
    block_size, size = rng.choice([1, 2, 4]), 1 + seed // 10
    manager = BlockManager(rng.randint(6, 12), block_size, seed % 5 != 4)
    chunk = rng.choice([2, 4, 8])
    config = SchedulerConfig(max_num_seqs=rng.randint(1, 4), max_num_batched_tokens=rng.choice([4, 8]), chunk_size=chunk)
    scheduler: Scheduler = type("Learners", (Scheduler,), {name: version})(config, manager)
    most = manager.num_blocks * block_size
    arrivals = [
        (
            rng.randrange(2 * size),
            [rng.randrange(2) for _ in range(rng.randint(1, most - 2))],
            rng.randint(1, 6),
            rng.random() < 0.2,
        )
        for _ in range(min(size, 6))
    ]
    seen: dict[str, object] = {"requests": f"blocks of {block_size}, {manager.num_blocks} in all, {config}"}
    unfinished: list[Sequence] = []
    for step in range(400):
        for number, (when, prompt, num_new, has_fork) in enumerate(arrivals):
            if when == step:
                seq = _sequence(prompt, min(len(prompt) + num_new, most), str(number))
                if has_fork and 2 * seq.max_num_tokens < most:
                    seq.forks = [Sequence(str(number), list(prompt), seq.params, 0, seq.max_num_tokens, index=1)]
                unfinished += [seq, *seq.forks]
                scheduler.add(seq)
        plan = scheduler.schedule()
        seen[f"step {step}"] = {
            "runs": [(item.sequence.sequence_id, item.num_new_tokens) for item in plan.scheduled],
            "preempts": [seq.sequence_id for seq in plan.preempted],
            "cached": [item.sequence.num_cached_tokens for item in plan.scheduled],
            "tables": [list(item.sequence.block_table) for item in plan.scheduled],
        }
        scheduler.commit(plan)
        for seq, _ in plan.rows:
            scheduler.append(seq, rng.randrange(2))
            if len(seq.token_ids) >= seq.max_num_tokens:
                scheduler.finish(seq)
                unfinished.remove(seq)
        if not unfinished and step > max(when for when, *_ in arrivals):
            break
    seen["unfinished"] = len(unfinished)
    seen["free blocks at the end"] = manager.num_free_blocks
    return seen


def _scheduler_cases(name: str) -> Iterator[Case]:
    for seed in range(150):
        words = f"{min(1 + seed // 10, 6)} random request(s) in a small pool (simulation {seed})"
        yield Case(words, partial(_simulate, name, seed))


def _scheduler(name: str, version: Version, seed: int) -> tuple[Scheduler, random.Random]:
    """Return a scheduler with running sequences, some decoding and some prefilling, in blocks of 2."""
    rng = random.Random(seed)
    config = SchedulerConfig(max_num_batched_tokens=16, chunk_size=rng.choice([2, 4, 8]))
    scheduler: Scheduler = type("Learners", (Scheduler,), {name: version})(config, BlockManager(8, 2))
    for number in range(1 + seed // 30):
        seq = _sequence([rng.randrange(9) for _ in range(rng.randint(2, 9))], name=str(number))
        num_computed = rng.choice([len(seq.token_ids) - 1, rng.randrange(len(seq.token_ids))])
        if not scheduler.block_manager.can_allocate(seq, num_computed):
            break
        scheduler.block_manager.allocate(seq, num_computed)
        seq.num_computed_tokens, seq.status = num_computed, SequenceStatus.RUNNING
        if rng.random() < 0.3 and num_computed == len(seq.token_ids) - 1:  # its newest token is still being sampled
            seq.num_computed_tokens, seq.num_pending_tokens = len(seq.token_ids), 1
            seq.max_num_tokens = seq.num_tokens + rng.choice([0, 5])
        scheduler.running.append(seq)
    return scheduler, rng


def _described(scheduler: Scheduler) -> str:
    running = [
        f"{seq.num_computed_tokens} of {seq.num_tokens} tokens (at most {seq.max_num_tokens})" for seq in scheduler.running
    ]
    return f"blocks of 2, {scheduler.block_manager.num_free_blocks} free, running: {'; '.join(running)}"


def _running_cases(name: str) -> Iterator[Case]:
    """Yield cases of scheduling what already runs, in a pool that is nearly full."""
    for seed in range(150):
        before, rng = _scheduler("make", print, seed)
        budget = rng.randint(1, 16)

        def observe(version: Version, seed: int = seed, budget: int = budget) -> object:
            scheduler, _ = _scheduler(name, version, seed)
            scheduler.choose_victim = lambda running, seq: running[-1 - seed % 2] if len(running) > 1 else seq  # type: ignore[method-assign]
            selection = _Selection(budget)
            scheduler._continue_running(selection)
            parts = {"preempted": selection.preempted, "running": scheduler.running, "waiting": scheduler.waiting}
            runs = [(item.sequence.request_id, item.num_new_tokens) for item in selection.scheduled]
            names = {part: [seq.request_id for seq in sequences] for part, sequences in parts.items()}
            return {"runs": runs, "budget left": selection.budget, **names}

        yield Case(f"budget {budget}, chunk grid {before.config.chunk_grid}; {_described(before)}", observe)
    yield from _scheduler_cases(name)


def _chunk_cases() -> Iterator[Case]:
    for grid in (1, 2, 4, 5):
        for num_tokens in range(1, 12):
            for start in range(num_tokens):
                for given in (None, start):
                    words = f"{num_tokens} tokens, {start} computed, chunk grid {grid}, num_computed_tokens={given}"

                    def observe(
                        version: Version, grid: int = grid, n: int = num_tokens, s: int = start, given: int | None = given
                    ) -> object:
                        config = SchedulerConfig(max_num_batched_tokens=16, chunk_size=grid)
                        seq = _sequence(list(range(n)))
                        seq.num_computed_tokens = s if given is None else n // 2
                        return version(Scheduler(config, BlockManager(8, 4)), seq, given)

                    yield Case(words, observe)


def _pack_cases() -> Iterator[Case]:
    def observe(version: Version, seed: int) -> object:
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4])
        items = []
        for number in range(1 + seed // 20):
            seq = _sequence([rng.randrange(100) for _ in range(rng.randint(1, 9))], name=str(number))
            seq.block_table = rng.sample(range(40), 40 // 2)
            is_decode = rng.random() < 0.5
            seq.num_computed_tokens = len(seq.token_ids) - 1 if is_decode else rng.randrange(len(seq.token_ids))
            num_new = 1 if is_decode else rng.randint(1, seq.num_new_tokens)
            drafts = tuple(rng.randrange(100) for _ in range(rng.randint(0, 3))) if is_decode else ()
            items.append(ScheduledSequence(seq, num_new, drafts))
        previous = None
        if seed % 3 == 0:  # the last token of the first sequence is still being sampled by the step before
            first = items[0].sequence
            first.num_pending_tokens, first.num_computed_tokens = 1, len(first.token_ids)
            items[0] = ScheduledSequence(first, 1)
            previous = forward_batch.PreviousTokens(torch.arange(4), {first: 3})
        plan = StepPlan(scheduled=tuple(items), rows=rows_of(items))
        packed = version(plan, block_size, previous)
        return {**packed._asdict(), "sequences": [seq.sequence_id for seq in packed.sequences]}

    for seed in range(100):
        yield Case(f"{1 + seed // 20} sequence(s) of random lengths (case {seed})", partial(observe, seed=seed))


TASKS = [
    Task(
        "match_prefix",
        Function("nanoinfer.scheduling.prefix_index", "PrefixIndex.chain"),
        "03",
        "find the cached blocks that hold the beginning of a prompt.\n\n"
        "self.in_blocks(token_ids) yields the tokens of each full block as bytes. A block's content is the key of the block\n"
        "before it + these bytes, and self.keys maps a content to the block's key. The key before the first block is\n"
        "self.root(cache_salt). Return the keys. With blocks of 2 and [5, 6, 7, 8, 9] computed before, [5, 6, 7, 1] finds one.",
        (
            "Walk over the blocks of the prompt, and look one block up at a time.",
            "What you look up contains the key that was found before. Stop at the first miss.",
            "The last token must be computed for its logits. With 4 tokens and blocks of 2, only the first block may be used.",
        ),
        lambda: _block_cases("chain"),
    ),
    Task(
        "allocate",
        Function(_BLOCKS, "BlockManager.allocate"),
        "03",
        "give a sequence the blocks that its next tokens need.\n\n"
        "self.tables(seq) has the block tables of the KV groups, usually seq.block_table alone. self._take() returns a free\n"
        "block. self.blocks.ref_counts[block] says how many tables have a block, and self.blocks.drop([block]) gives one up.\n"
        "With blocks of 2, a table [0], 2 computed tokens and 3 new tokens, two blocks are appended.",
        (
            "Two things in turn: replace blocks that will be written and have several references, then append blocks.",
            "For a shared block: take a new block, put it into the table, drop the old block, and note the copy (old, new).",
            "The table is long enough when len(table) * block_size >= num_computed_tokens + num_new_tokens.",
        ),
        lambda: _block_cases("allocate"),
    ),
    Task(
        "cache_blocks",
        Function(_BLOCKS, "BlockManager.cache_finished_blocks"),
        "03",
        "enter full blocks into the prefix cache, so that match_prefix finds them.\n\n"
        "seq.prefix_keys has the keys of the blocks that were entered or found before. With it,\n"
        "self.index.further(keys, token_ids, end, salt) yields (content, key) of the later blocks of token_ids[:end], and\n"
        "self.index.enter(contents_and_keys, group, blocks) enters the blocks of a KV group. Usually there is only group 0,\n"
        "with seq.block_table; self.tables(seq) has the tables of all.",
        (
            "Blocks len(seq.prefix_keys) .. num_tokens // block_size - 1 are full and not yet entered.",
            "The tokens of full blocks end at num_tokens // block_size * block_size. further() also needs seq.cache_salt.",
            "Append the key of every full block to seq.prefix_keys. enter() itself keeps a block that is there already.",
        ),
        lambda: _block_cases("cache_finished_blocks"),
    ),
    Task(
        "next_chunk",
        Function(_SCHEDULER, "Scheduler.next_chunk"),
        "05",
        "how many tokens of a sequence one step computes.\n\n"
        "Prompts are cut at multiples of self.config.chunk_grid, counted from the prompt's first token. With a grid of 4 and\n"
        "11 tokens, the chunks that follow 0, 4 and 6 computed tokens have 4, 4 and 2.",
        (
            "A chunk ends at a multiple of the grid or at the sequence's end (seq.num_tokens), whichever comes first.",
            "start % grid tokens lie between the last multiple and the start.",
        ),
        _chunk_cases,
    ),
    Task(
        "make_room",
        Function(_SCHEDULER, "Scheduler._make_room"),
        "05",
        "preempt sequences when no block is free.\n\n"
        "self.choose_victim(self.running, seq) names a running sequence, by default the youngest, and maybe seq itself.\n"
        "self._preempt(victim) frees its blocks and lets it wait, but leaves it in self.running, from which you remove it.\n"
        "selection.drop(victim) notes that it was preempted, and removes it from what this step has scheduled.",
        (
            "Ask self.block_manager.can_allocate(seq, num_new_tokens), and preempt one sequence at a time until it says yes.",
            "If the victim is seq itself, there is nothing left to do for it: return False.",
        ),
        lambda: _running_cases("_make_room"),
    ),
    Task(
        "continue_running",
        Function(_SCHEDULER, "Scheduler._continue_running"),
        "05",
        "schedule the sequences that already run.\n\n"
        "self.next_chunk(seq) says how many tokens, self._make_room(seq, num, selection) whether there are blocks,\n"
        "and self._select(selection, seq, num) schedules. selection.budget is how many prompt tokens may be added. A sequence\n"
        "with a pending token whose num_tokens has reached max_num_tokens has nothing to compute.",
        (
            "Go through a copy of self.running, because a preemption shortens it, and skip those that it preempted.",
            "One new token always runs. More than one needs that many in the budget.",
            "If a chunk does not fit into the budget, it waits, and so do all younger chunks: set the budget to 0.",
        ),
        lambda: _running_cases("_continue_running"),
    ),
    Task(
        "start",
        Function(_SCHEDULER, "Scheduler._start"),
        "05",
        "start a waiting sequence, if there is room.\n\n"
        "Use self.block_manager.match_prefix, can_start(..., num_kept_free=) and start, self.next_chunk and self._select.\n"
        "Sequences with seq.wants_prompt_rows use no prefix (self._prefix_of). Put it into self.running, set status,\n"
        "num_computed_tokens, num_tokens_at_start and, for a sequence that was never preempted, num_cached_tokens.",
        (
            "The blocks that running sequences will soon need (num_reserved) stay free.",
            "The prefix's tokens count as computed. The chunk begins behind them and needs its tokens in the budget.",
            "One new token needs nothing of the budget. Change nothing before you know that there is room.",
        ),
        lambda: _scheduler_cases("_start"),
    ),
    Task(
        "pack",
        Function("nanoinfer.execution.forward_batch", "_pack"),
        "02",
        "put the new tokens of all sequences into one row, each with its position and its slot.\n\n"
        "Token i of a sequence has the slot block_table[i // block_size] * block_size + i % block_size. With blocks of 4 and\n"
        "a table [7, 2], token 5 has slot 9. Draft tokens follow the new token, each as a query of its own.",
        (
            "The new tokens are those from num_computed_tokens on. query_lens has one number per sequence, and a 1 per draft.",
            "seq_lens counts the tokens that the last query of each entry sees: end, then end + 1 for the first draft ...",
            "A token that is still being sampled (end > len(token_ids)) gets id 0, its index goes into placeholders, and\n"
            "          previous.rows[seq] into previous_rows.",
        ),
        _pack_cases,
    ),
]
