"""Explore every schedule of a small world: what a Scheduler and a BlockManager do, whatever happens in which order.

In: the classes, and the size of a World. Out: how many states they can reach, or the shortest run that violates an invariant:

- No block is lost or held twice, and when all answers have ended, all blocks are free.
- Each slot that a step reads holds its token, computed after all tokens before it and for the same salt. So a prefix hit, a
  fork and a copied block give what a computation would give.
- Each step keeps the rules of scheduler.py, and computes something or preempts a sequence.
- Every answer ends: no state leads back to itself by steps alone, so nobody waits or is preempted for ever.

Between two steps, requests arrive, are aborted or fail. A step samples any tokens of the alphabet, and any of them may be the
last. The states are a graph, which check_scheduler() walks breadth first, so the first violated invariant has a shortest run.

States with the same future are explored once. They may differ in block ids, in the names of sequences, in counts that no
decision reads, and in tokens: block keys are digests, so it only matters where two sequences have the same tokens.

This is explicit-state model checking, as TLC does it for TLA+ (Lamport, Specifying Systems, 2002, chapter 14), of the classes
that run in the engine. Nothing here imports torch.
"""

import io
import itertools
import marshal
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from copyreg import dispatch_table
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b
from struct import Struct
from typing import Literal, NamedTuple

from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import check_integer, out_of_range
from nanoinfer.execution.executor import PromptReader
from nanoinfer.features import tracing
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.speculator import Proposer, Speculator
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import NOBODY
from nanoinfer.scheduling.policies import PreemptingScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer_lab.testing.rules import Memory, run_step

PARAMS = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class World:
    """How much room there is, and what can happen at most. Each number multiplies the number of states."""

    num_requests: int = 3  # the requests that arrive
    num_blocks: int = 4  # the blocks of the pool
    block_size: int = 2  # the tokens of a block
    max_num_seqs: int = 2  # the sequences that run at a time
    chunk_size: int = 2  # the tokens of a prompt's chunk
    max_num_batched_tokens: int = 0  # the prompt tokens of a step. 0: chunk_size
    num_token_ids: int = 2  # the size of the alphabet
    max_prompt_len: int = 4  # the tokens of the longest prompt
    max_tokens: int = 3  # the tokens of the longest answer
    num_forks: int = 1  # how many requests have two answers (n = 2)
    num_aborts: int = 1  # how many requests are aborted or fail
    num_readers: int = 0  # how many requests have a PromptReader, for which all rows of a prompt are computed
    num_salts: int = 1  # the different salts of requests
    max_adapters: int = 0  # the LoRA adapters of running sequences. Each salt but the first belongs to one. 0: there are none
    num_ranks: int = 1  # the different priorities and deadlines of requests
    num_resets: int = 0  # how often the prefix cache is reset, or a step fails so that the engine restarts all sequences
    num_speculative_tokens: int = 0  # the most drafts of a sequence in a step. Each draft is token 0
    enable_prefix_caching: bool = True  # whether full blocks are cached
    # Whether a step is planned before the previous step's tokens are known, as on a GPU. Not with drafts
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        """Raises: InvalidValueError: no request can arrive, or there are drafts with async_scheduling."""
        for name in ("num_requests", "num_blocks", "block_size", "num_token_ids", "max_prompt_len", "max_tokens", "num_ranks"):
            check_integer(name, getattr(self, name), 1, None, ">= 1")
        if (num_slots := self.num_blocks * self.block_size) < 2:
            raise out_of_range("num_blocks * block_size", num_slots, ">= 2, for a prompt and its answer; raise num_blocks")
        if self.async_scheduling and (num := self.num_speculative_tokens):
            raise out_of_range("num_speculative_tokens", num, "0 with async_scheduling; leave it out, or async_scheduling")


class Arrive(NamedTuple):
    """A request arrives. rank: its priority and its deadline."""

    prompt: tuple[int, ...]
    n: int = 1
    salt: str | None = None
    rank: int = 0
    is_read: bool = False

    def __str__(self) -> str:
        given = self._asdict()
        more = (f", {name}={given[name]}" for name, default in self._field_defaults.items() if given[name] != default)
        return f"a request arrives: prompt {' '.join(map(str, self.prompt))}{''.join(more)}"


class Abort(NamedTuple):
    """A request is aborted, or fails, so that its blocks leave the prefix cache. age: 0 is the oldest unfinished request."""

    age: int
    has_failed: bool = False

    def __str__(self) -> str:
        return f"unfinished request {self.age} {'fails' if self.has_failed else 'is aborted'}"


class Reset(NamedTuple):
    """The prefix cache is reset, or a step fails and all sequences start again."""

    what: Literal["reset_prefix_cache", "restart"]

    def __str__(self) -> str:
        return f"{self.what}()"


class RunStep(NamedTuple):
    """A step. sampled: for each row the sampled id, and whether the answer ends with it. None: a draft before was wrong."""

    sampled: tuple[tuple[int, bool] | None, ...] = ()

    def __str__(self) -> str:
        samples = (f"{given[0]}{' (the last)' * given[1]}" for given in self.sampled if given is not None)
        return f"a step samples {', '.join(samples) or 'nothing'}"


Event = Arrive | Abort | Reset | RunStep


class InvariantError(AssertionError):
    """An invariant of the scheduler or of the block manager does not hold."""

    world: World
    events: list[Event]  # the run, of which no shorter one violates an invariant


class Explored(NamedTuple):
    """What check_scheduler() has seen, in which every invariant holds."""

    num_states: int  # the number of different states
    num_transitions: int  # the number of events, each in each state in which it can happen
    num_events: int  # the most events of a shortest run to a state
    seconds: float  # the time it took


def check_scheduler(
    scheduler_cls: type[Scheduler] = Scheduler,
    block_manager_cls: type[BlockManager] = BlockManager,
    world: World = World(),
    progress: Callable[[Explored], object] | None = None,
) -> Explored:
    """Check everything that the two classes can do in a world.

        def test_my_scheduler():
            check_scheduler(MyScheduler, MyBlocks, World(num_requests=2))

    Args:
        progress: called with what was seen so far, when all states that a number of events can reach are known.

    Raises:
        InvariantError: after a shortest run that violates an invariant.
    """
    start = time.perf_counter()
    graph = _Graph(scheduler_cls, block_manager_cls, world)
    most_events = 2 * world.num_requests * (world.max_prompt_len + world.max_tokens) ** 2  # as Sequences make progress
    num_events, newest = 0, [(0, graph.first)]
    while following := [found for number, saved in newest for found in graph.expand(number, saved)]:
        num_events, newest = num_events + 1, following
        if num_events > most_events:
            raise graph.broken(InvariantError("every answer ends"), graph.run_to(newest[0][0]))
        if progress is not None:
            progress(Explored(len(graph.origins), graph.num_transitions, num_events, time.perf_counter() - start))
    graph.check_that_runs_end()
    return Explored(len(graph.origins), graph.num_transitions, num_events, time.perf_counter() - start)


def replay(
    scheduler_cls: type[Scheduler],
    block_manager_cls: type[BlockManager],
    world: World,
    events: ListLike[Event],
    recorder: "tracing.Recorder",
) -> None:
    """Record a run of check_scheduler(), for a page that replays it. A violation is recorded as far as it goes."""
    observer = tracing.TracingObserver(recorder, world.block_size)
    observer.emit(
        tracing.EngineStarted(
            f"a world of {world.num_requests} requests", 0, "none", "none", "none", world.num_token_ids, world.num_blocks,
            world.block_size, world.max_num_seqs, world.chunk_size, world.num_blocks * world.block_size,
        )
    )  # fmt: skip
    state = State.new(world, scheduler_cls, block_manager_cls, observer)
    try:
        for event in events:
            state.apply(event)
    except Exception:  # the violated invariant
        pass
    observer.flush()


class _Guesses(Proposer):
    """Drafts of token 0."""

    def __init__(self, config: SpeculativeConfig) -> None:
        pass

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return [[0] * limit for limit in limits]

    def forget(self, seq: Sequence) -> None:
        pass


@dataclass(slots=True)
class State:
    """A state: the scheduler, what its blocks would hold, and what has happened so far."""

    world: World
    scheduler: Scheduler
    memory: Memory
    alive: list[Sequence] = field(default_factory=list)  # unfinished sequences, the oldest first
    num_arrived: int = 0
    num_forked: int = 0
    num_read: int = 0
    num_aborted: int = 0
    num_resets: int = 0
    observer: "tracing.TracingObserver | None" = None  # None: nothing is recorded

    @classmethod
    def new(
        cls,
        world: World,
        scheduler_cls: type[Scheduler],
        block_manager_cls: type[BlockManager],
        observer: "tracing.TracingObserver | None" = None,
    ) -> "State":
        config = SchedulerConfig(
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens or world.chunk_size,
            chunk_size=world.chunk_size,
        )
        watched = observer or NOBODY
        manager = block_manager_cls(world.num_blocks, world.block_size, world.enable_prefix_caching, watched)
        scheduler = scheduler_cls(config, manager, watched)
        if world.max_adapters:
            scheduler.limits = {"adapter": world.max_adapters}
        return cls(world, scheduler, Memory(manager), observer=observer)

    # ---- what can happen

    def events(self) -> Iterator[Event]:
        """Yield what can happen before the next step."""
        world = self.world
        ns, reads = range(1, 2 + (self.num_forked < world.num_forks)), range(1 + (self.num_read < world.num_readers))
        if self.num_arrived < world.num_requests:
            salts = [None, *map(str, range(1, world.num_salts))]
            tokens, met = self.tokens(), set()
            for length in range(1, min(world.max_prompt_len, world.num_blocks * world.block_size - 1) + 1):
                for prompt in itertools.product(range(world.num_token_ids), repeat=length):
                    for salt, *more in itertools.product(salts, ns, range(world.num_ranks), reads):
                        n, rank, is_read = more
                        if (part := (tokens.new_part(salt, prompt), *more)) not in met:
                            met.add(part)
                            yield Arrive(prompt, n, salt, rank, bool(is_read))
        if self.num_aborted < world.num_aborts:
            for age, has_failed in itertools.product(range(len(self._requests())), (False, True)):
                yield Abort(age, has_failed)
        if self.num_resets < world.num_resets and self.alive:
            yield Reset("reset_prefix_cache")
            yield Reset("restart")

    def samples(self, plan: StepPlan) -> Iterator[RunStep]:
        """Yield what a step with this plan can sample."""
        drafts = {item.sequence: item.draft_token_ids for item in plan.scheduled}
        ending = {seq for seq, _, is_last in self.memory.unread if is_last}

        def sampled(num_left: int, drafts: tuple[int, ...]) -> Iterator[tuple[tuple[int, bool] | None, ...]]:
            token_ids = range(self.world.num_token_ids) if num_left > 1 else ()
            for token_id in token_ids:
                following = sampled(num_left - 1, drafts[1:]) if drafts[:1] == (token_id,) else [(None,) * len(drafts)]
                yield from (((token_id, False), *more) for more in following)
            yield ((0, True), *[None] * len(drafts))

        rows = []
        for seq in dict.fromkeys(seq for seq, _ in plan.rows):
            num_left = 1 if seq in ending else seq.max_num_tokens - len(self.memory.tokens(seq))
            rows.append([*sampled(num_left, drafts.get(seq, ()))])
        return (RunStep(tuple(itertools.chain.from_iterable(parts))) for parts in itertools.product(*rows))

    def apply(self, event: Event) -> None:
        if isinstance(event, RunStep):
            self.sample(self.plan(), event)
        elif isinstance(event, Arrive):
            self.arrive(event)
        elif isinstance(event, Abort):
            self.abort(event)
        else:
            self.reset(event)
        self.check_blocks()

    def arrive(self, event: Arrive) -> None:
        self.num_forked += event.n > 1
        self.num_read += event.is_read
        name, capacity = str(self.num_arrived), self.world.num_blocks * self.world.block_size
        self.num_arrived += 1
        first, *forks = [
            Sequence(
                name,
                list(event.prompt),
                PARAMS,
                seed=0,
                max_num_tokens=min(len(event.prompt) + self.world.max_tokens, capacity),
                reader=PromptReader() if event.is_read else None,
                is_answered=not event.is_read,
                index=index,
                priority=event.rank if self.scheduler.reads_priority else 0,
                deadline=float(event.rank),
                cache_salt=event.salt,
                extras={"adapter": event.salt},
            )
            for index in range(event.n)
        ]
        first.forks = forks
        self.alive += [first, *forks]
        if self.observer is not None:
            tokens = tuple(map(str, event.prompt))
            self.observer.emit(tracing.RequestAdded(name, " ".join(tokens), event.prompt, tokens, {"n": event.n}))
        self.scheduler.add(first)

    def abort(self, event: Abort) -> None:
        self.num_aborted += 1
        for seq in self._requests()[event.age]:
            failed = self.memory.full_blocks(seq)[: len(seq.prefix_keys)] if event.has_failed else []
            kept = self.memory.cached().keys() - failed
            if event.has_failed:
                self.scheduler.block_manager.forget_cached(seq)
            self._finish(seq)
            found = self.memory.cached().keys()
            assert found == kept, "blocks of a failed request leave the prefix cache, and no others"

    def reset(self, event: Reset) -> None:
        self.num_resets += 1
        if event.what == "restart":
            self.memory.unread.clear()
            self.scheduler.restart()
        else:
            self.scheduler.block_manager.reset_prefix_cache()
            assert not self.memory.cached(), "reset_prefix_cache leaves no block in the prefix cache"

    def plan(self) -> StepPlan:
        """Schedule, compute and commit a step."""
        speculator = None
        if num := self.world.num_speculative_tokens:
            config = SpeculativeConfig(method=_Guesses, num_speculative_tokens=num, adaptive=False)
            speculator = Speculator(_Guesses(config), config)
        return run_step(self.scheduler, self.memory, self.alive, speculator)

    def sample(self, plan: StepPlan, event: RunStep) -> None:
        """Append the tokens of a step, or those of the step before with async_scheduling."""
        rows = zip(plan.rows, event.sampled, strict=True)
        sampled = [(seq, *token) for (seq, _), token in rows if token is not None]
        if self.world.async_scheduling:
            sampled, self.memory.unread = self.memory.unread, sampled
        for seq, token_id, is_last in sampled:
            if seq.status is not SequenceStatus.FINISHED:
                self.scheduler.append(seq, token_id)
                is_computed = self.world.async_scheduling or seq.num_new_tokens == 1
                assert is_computed, "a sampled token is the only new token of its sequence"
                is_last = is_last or len(seq.token_ids) == seq.max_num_tokens
                if self.observer is not None:
                    at, text, reason = len(seq.token_ids) - 1, str(token_id), "stop" if is_last else None
                    appended = tracing.TokenAppended(seq.sequence_id, at, token_id, text, f" {text}", "", 0, reason, None)
                    self.observer.emit(appended)
                if is_last:
                    self._finish(seq)

    def check_blocks(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.block_manager.blocks
        counts = Counter(block for seq in self.alive for block in seq.block_table)
        for block, references in enumerate(pool.ref_counts):
            assert references == counts[block], "a block has a reference for each block table that it is in"
        free = [*pool.empty, *pool.reusable]
        assert len(free) == len({*free}), "a free block is free once"
        assert {*free} == {*range(self.world.num_blocks)} - counts.keys(), "exactly the blocks in no block table are free"
        assert all(pool.contents[block] for block in pool.reusable), "a reusable block is in the prefix cache"
        for seq in self.alive:
            is_running = seq.status is SequenceStatus.RUNNING
            assert is_running == (seq in scheduler.running), "`running` has the sequences that run"
            has_blocks = seq.block_table or seq.prefix_keys or seq.num_computed_tokens
            assert is_running or not has_blocks, "only running sequences hold blocks, keys and computed tokens"
        num_pending = sum(len(seq.forks) for seq in self.alive)
        assert scheduler.num_unfinished + num_pending == len(self.alive), "every unfinished sequence runs, waits or is a fork"

    # ---- which states are the same

    def tokens(self) -> "TokenTree":
        """Return all tokens that a prompt can meet."""
        tree = TokenTree()
        for seq in self.alive:
            tree.add(seq.cache_salt, self.memory.tokens(seq))
        for content in self.memory.cached():
            tree.add(*content)
        return tree

    def key(self) -> bytes:
        """Return a digest that is equal for states with the same future."""
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        pool, tree = manager.blocks, TokenTree()
        held = [block for seq in scheduler.running for block in seq.block_table]
        numbers = {block: number for number, block in enumerate(dict.fromkeys([*held, *pool.reusable, *pool.empty]))}
        ages = {name: age for age, name in enumerate(dict.fromkeys(seq.request_id for seq in self.alive))}
        unread = {seq: is_last for seq, _, is_last in self.memory.unread if seq.request_id in ages}
        may_be_preempted = getattr(scheduler, "may_be_preempted", lambda seq: False)

        def describe(seq: Sequence) -> tuple[object, ...]:
            return (
                (ages[seq.request_id], seq.index, seq.priority, len(seq.prompt_token_ids)),
                (seq.num_tokens - len(seq.token_ids), seq.num_computed_tokens),
                (may_be_preempted(seq), len(seq.prefix_keys), len(seq.forks)),
                (tree.add(seq.cache_salt, self.memory.tokens(seq)), [numbers[block] for block in seq.block_table]),
                (unread.get(seq), seq.is_answered),
            )

        parts = (
            [[*map(describe, queue)] for queue in (scheduler.running, scheduler.waiting)],
            [tree.add(*self.memory.last(block)) if pool.contents[block] else None for block in numbers],
            (len(pool.reusable), self.num_arrived, self.num_forked, self.num_read, self.num_aborted, self.num_resets),
            [
                _dumps(more)
                for more in (_own_attributes(scheduler, PreemptingScheduler), _own_attributes(manager, BlockManager))
                if more
            ],
        )
        return blake2b(marshal.dumps(parts, 2), digest_size=16).digest()

    def _requests(self) -> list[list[Sequence]]:
        """Return the unfinished sequences of each request, the oldest first."""
        return [[*group] for _, group in itertools.groupby(self.alive, key=lambda seq: seq.request_id)]

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.alive.remove(seq)


class TokenTree:
    """Numbers the tokens that follow each prefix, in the order in which they are added.

    Two tokens that change places behind one prefix, in all sequences and blocks, change nothing else.
    """

    def __init__(self) -> None:
        # None is always the first, because requests without a salt have no adapter. Each dict holds dicts like itself.
        self._roots: dict[str | None, tuple[int, dict]] = {None: (0, {})}  # type: ignore[type-arg]

    def add(self, salt: str | None, token_ids: tuple[int, ...]) -> list[int]:
        """Return the numbers of the salt and of each token."""
        number, below = self._roots.setdefault(salt, (len(self._roots), {}))
        numbers = [number]
        for token_id in token_ids:
            number, below = below.setdefault(token_id, (len(below), {}))
            numbers.append(number)
        return numbers

    def new_part(self, salt: str | None, token_ids: tuple[int, ...]) -> tuple[object, ...]:
        """Return what is equal for prompts that differ only in tokens that were never added in their place."""
        if salt not in self._roots:
            return (len(token_ids),)
        below = self._roots[salt][1]
        for index, token_id in enumerate(token_ids):
            if token_id not in below:
                return salt, token_ids[:index], len(token_ids)
            below = below[token_id][1]
        return salt, token_ids


class _Graph:
    """The states that were reached, with the event that reached each first."""

    def __init__(self, scheduler_cls: type[Scheduler], block_manager_cls: type[BlockManager], world: World) -> None:
        self.world = world
        first = State.new(world, scheduler_cls, block_manager_cls)
        self.first = _dumps(first)
        self.origins: list[tuple[int, Event]] = [(-1, RunStep())]
        self.num_transitions = 0
        self._numbers = {first.key(): 0}
        self._by_steps: dict[int, list[int]] = {}  # the states that a step leads to

    def expand(self, number: int, saved: bytes) -> list[tuple[int, bytes]]:
        """Return the new states that follow a state."""
        new = []
        for event, state in self._follow(number, saved):
            self.num_transitions += 1
            key = state.key()
            if key not in self._numbers:
                self._numbers[key] = len(self.origins)
                self.origins.append((number, event))
                new.append((self._numbers[key], _dumps(state)))
            if isinstance(event, RunStep):
                self._by_steps.setdefault(number, []).append(self._numbers[key])
        return new

    def _follow(self, number: int, saved: bytes) -> Iterator[tuple[Event, State]]:
        state: State = pickle.loads(saved)
        events = [*state.events()]
        event: Event = RunStep()
        try:
            if state.alive:
                plan = state.plan()
                planned = _dumps((state, plan))
                for event in state.samples(plan):
                    state, plan = pickle.loads(planned)
                    state.sample(plan, event)
                    state.check_blocks()
                    yield event, state
            for event in events:
                state = pickle.loads(saved)
                state.apply(event)
                yield event, state
        except Exception as error:
            raise self.broken(error, [*self.run_to(number), event]) from error

    def run_to(self, number: int) -> list[Event]:
        """Return a shortest run to a state."""
        events = []
        while number:
            number, event = self.origins[number]
            events.append(event)
        return events[::-1]

    def check_that_runs_end(self) -> None:
        """Raises: InvariantError if a state leads back to itself by steps alone."""
        try:
            TopologicalSorter(self._by_steps).prepare()
        except CycleError as error:
            broken = InvariantError("every answer ends: from here on, steps lead back to the same state")
            raise self.broken(broken, self.run_to(min(error.args[1]))) from None  # the state that was reached first

    def broken(self, error: Exception, events: list[Event]) -> InvariantError:
        invariant = str(error) if isinstance(error, AssertionError) else f"the class raised {type(error).__name__}: {error}"
        broken = InvariantError("\n".join([invariant, "A shortest run:", *(f"{n}. {e}" for n, e in enumerate(events, 1))]))
        broken.world, broken.events = self.world, events
        return broken


# ---- copies of states


@cache
def _plain_attributes(cls: type) -> frozenset[str]:
    plain = BlockManager(1, 1) if cls is BlockManager else PreemptingScheduler(SchedulerConfig(), BlockManager(1, 1))
    return frozenset(vars(plain))


def _own_attributes(instance: object, cls: type) -> dict[str, object]:
    """Return the attributes that a subclass adds."""
    return {name: value for name, value in vars(instance).items() if name not in _plain_attributes(cls)}


_constants: dict[int, object] = {}  # by id(): what the copies of a state share


def _constant(number: int) -> object:
    return _constants[number]


def _share(constant: object) -> tuple[Callable[[int], object], tuple[int]]:
    _constants.setdefault(id(constant), constant)
    return _constant, (id(constant),)


class _Pickler(pickle.Pickler):
    dispatch_table = dispatch_table | dict.fromkeys((World, SamplingParams, SchedulerConfig, SequenceStatus), _share)
    dispatch_table[Struct] = lambda struct: (Struct, (struct.format,))


def _dumps(what: object) -> bytes:
    """Return a copy as bytes for pickle.loads of this process: both together take a third of the time of copy.deepcopy."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(what)
    return file.getvalue()
