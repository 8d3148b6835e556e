"""The rules that each step keeps, whatever the policy, and a model of the memory.

A slot holds what a real cache would hold: a token's keys and values depend on all tokens before it, so a slot holds their
tuple, with the salt. If every slot that a step reads holds what it should, the tokens are those of any other policy.

run_step() checks a step against the rules of scheduler.py, whose numbers it names. It computes what they allow from the queues,
the block tables and the slots, and notes what the policy answers, so that the rules hold for every subclass that overrides only
the methods that are made for it. What a sequence needs is computed for block managers with one block table per sequence: with
windows, states or a store, the rules about room are not checked.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from nanoinfer.features.hybrid.block_manager import HybridBlockManager
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import SchedulingObserver
from nanoinfer.scheduling.policies import PreemptingScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from nanoinfer.features.drafts.speculator import Speculator

Slot = tuple[str | None, tuple[int, ...]]  # a salt, and all tokens up to that of the slot


@lru_cache(4096)
def _contents(salt: str | None, token_ids: tuple[int, ...]) -> list[Slot]:
    return [*_contents(salt, token_ids[:-1]), (salt, token_ids)] if token_ids else []


class Memory:
    """The slots of a cache."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.slots: list[Slot | None] = [None] * (manager.num_blocks * manager.block_size)  # None: nothing was written
        # With async_scheduling: (sequence, sampled token that the scheduler does not know yet, whether the answer ends with it)
        self.unread: list[tuple[Sequence, int, bool]] = []

    def tokens(self, seq: Sequence) -> tuple[int, ...]:
        """Return the sequence's tokens with those that only the device knows."""
        return (*seq.token_ids, *(token_id for other, token_id, _ in self.unread if other is seq))

    def slot(self, seq: Sequence, i: int) -> int:
        return seq.block_table[i // self.manager.block_size] * self.manager.block_size + i % self.manager.block_size

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        size = self.manager.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

    def write(self, seq: Sequence, first: int, end: int) -> None:
        contents = _contents(seq.cache_salt, self.tokens(seq))
        for i in range(first, end):
            self.slots[self.slot(seq, i)] = contents[i]

    def check(self, seq: Sequence, end: int) -> None:
        """Check that every one of the sequence's first `end` tokens is where its block table says."""
        contents = _contents(seq.cache_salt, self.tokens(seq))
        for i in range(end):
            found = self.slots[self.slot(seq, i)]
            assert found == contents[i], (
                f"block {seq.block_table[i // self.manager.block_size]} must hold token {i} of sequence {seq.sequence_id}, "
                f"which follows from {contents[i]}, but it holds {'nothing' if found is None else f'what follows from {found}'}"
            )

    def capacity(self) -> int:
        """Return the tokens of the longest sequence that fits alone."""
        return self.manager.num_blocks * self.manager.block_size

    def last(self, block: int) -> Slot:
        """Return the content of a full block's last slot."""
        content = self.slots[(block + 1) * self.manager.block_size - 1]
        assert content is not None, f"block {block} must be full"
        return content

    def cached(self) -> dict[Slot, int]:
        """Return the blocks in the prefix cache by the content of their last slots."""
        return {self.last(block): block for block, content in enumerate(self.manager.blocks.contents) if content}

    def full_blocks(self, seq: Sequence) -> list[Slot]:
        """Return the contents of the blocks that a sequence's known tokens fill."""
        size = self.manager.block_size
        return _contents(seq.cache_salt, tuple(seq.token_ids))[size - 1 :: size]

    def prefix(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that hold the start of a sequence, without its last token."""
        cached, num_blocks = self.cached(), (len(seq.token_ids) - 1) // self.manager.block_size
        blocks = takewhile(lambda block: block is not None, map(cached.get, self.full_blocks(seq)[:num_blocks]))
        return [] if seq.needs_all_rows else [block for block in blocks if block is not None]


class _ObservedStep(SchedulingObserver):
    """A step's plan, what was before it, the events, and what the policy was asked and answered.

    Attributes:
        running, waiting: the queues before the step.
        budget: what is left of max_num_batched_tokens while sequences start.
        candidates: the sequences that order_waiting returned, as far as the scheduler asked.
        is_asked, is_exhausted: whether it asked for the first, and for one after the last.
        refused: those that may not start.
        victims: the sequences that choose_victim answered, each with the sequence that lacked a block.
        exchanges: the sequences that lacked room to start, each with the sequence that to_preempt answered.
        cached, preempted: the sequences that have started, each with its cached tokens, and those that were preempted.
    """

    def __init__(self, scheduler: Scheduler, memory: Memory) -> None:
        self.scheduler, self.memory, self.manager = scheduler, memory, scheduler.block_manager
        self.policy, self.config, self.size = type(scheduler), scheduler.config, scheduler.block_manager.block_size
        self.running, self.waiting = [*scheduler.running], [*scheduler.waiting]
        self.before = {seq: seq.num_computed_tokens for seq in self.running}
        self.forks = {seq: [*seq.forks] for seq in (*self.running, *self.waiting)}
        self.budget, self.is_asked, self.is_exhausted = 0, False, False
        self.candidates: list[Sequence] = []
        self.refused: set[Sequence] = set()
        self.victims: dict[Sequence, Sequence] = {}
        self.exchanges: dict[Sequence, Sequence | None] = {}
        self.cached: dict[Sequence, int] = {}
        self.preempted: list[Sequence] = []
        self.has_room_rules = not isinstance(self.manager, HybridBlockManager)
        methods = (self.order_waiting, self.may_start, self.choose_victim, self.to_preempt)
        vars(scheduler).update({method.__name__: method for method in methods})
        self.observer, scheduler.observer = scheduler.observer, self
        try:
            self.plan = scheduler.schedule()
        finally:
            scheduler.observer = self.observer
            for method in methods:
                delattr(scheduler, method.__name__)

    # ---- the events

    def scheduling_begun(self) -> None:
        self.observer.scheduling_begun()

    def sequence_started(self, seq: Sequence, num_cached_tokens: int) -> None:
        self.cached[seq] = num_cached_tokens
        self.observer.sequence_started(seq, num_cached_tokens)

    def sequence_preempted(self, seq: Sequence) -> None:
        self.preempted.append(seq)
        self.observer.sequence_preempted(seq)

    def step_scheduled(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self.observer.step_scheduled(plan, scheduler)

    # ---- the methods of the policy

    def order_waiting(self, waiting: deque[Sequence]) -> Iterator[Sequence]:
        self.is_asked, self.budget = True, self.chunks()[1]
        for seq in self.policy.order_waiting(self.scheduler, waiting):
            self.candidates.append(seq)
            yield seq
            self.check_candidate(is_last=False)
        self.is_exhausted = True

    def may_start(self, seq: Sequence) -> bool:
        if not (answer := self.policy.may_start(self.scheduler, seq)):
            self.refused.add(seq)
        return answer

    def choose_victim(self, running: list[Sequence], seq: Sequence) -> Sequence:
        victim = self.policy.choose_victim(self.scheduler, running, seq)
        if seq.status is SequenceStatus.RUNNING:  # otherwise to_preempt asks
            assert self.lacks_blocks(seq), f"rule 4: sequence {seq.sequence_id} has blocks, so no sequence must be preempted"
            youngest = self.policy.choose_victim is not Scheduler.choose_victim or victim is self.scheduler.running[-1]
            assert youngest, f"rule 4: the sequence that started last must be preempted, not {victim.sequence_id}"
            self.victims[victim] = seq
        return victim

    def to_preempt(self, running: list[Sequence], waiting: list[Sequence]) -> Sequence | None:
        seq, new = self.candidates[-1], [seq for seq in self.waiting if seq.status is SequenceStatus.WAITING]
        _same("the waiting sequences of to_preempt", waiting, [seq, *(other for other in new if other is not seq)])
        _same("the running sequences of to_preempt", running, self.exchangeable())
        assert isinstance(self.scheduler, PreemptingScheduler), "no other asks"
        self.exchanges[seq] = type(self.scheduler).to_preempt(self.scheduler, running, waiting)
        return self.exchanges[seq]

    # ---- what the rules say

    def chunk(self, seq: Sequence, first: int) -> int:
        """Return the tokens from `first` to the next multiple of the grid, or to the sequence's end (rule 3)."""
        grid = self.config.chunk_grid
        return min(seq.num_tokens, first - first % grid + grid) - first

    def chunks(self) -> tuple[dict[Sequence, int], int]:
        """Return what each running sequence computes before any other preempts it, and the budget that is left (rules 2, 3)."""
        chunks, budget = {}, self.config.max_num_batched_tokens
        for index, seq in enumerate(self.running):
            chunks[seq] = self.chunk(seq, self.before[seq])
            if seq in self.victims and index >= self.running.index(self.victims[seq]):
                chunks[seq] = 0  # it was preempted before its turn
            elif len(seq.token_ids) < seq.num_tokens and seq.num_tokens >= seq.max_num_tokens:
                chunks[seq] = 0  # its last token is in flight
            elif chunks[seq] > 1 and budget < chunks[seq]:
                chunks[seq] = budget = 0
            budget -= chunks[seq] if chunks[seq] > 1 else 0
        return chunks, budget

    def exchangeable(self) -> list[Sequence]:
        """Return the running sequences with a new token since they started (rule 7)."""
        may_be = getattr(self.scheduler, "may_be_preempted", lambda seq: False)
        return [seq for seq in self.scheduler.running if may_be(seq)]

    def lacks_blocks(self, seq: Sequence) -> bool:
        """Return whether the free blocks do not suffice for a running sequence's next chunk, with the copies (rule 4)."""
        counts = Counter(block for other in self.scheduler.running for block in other.block_table)
        first = seq.num_computed_tokens
        num_new = -(-(first + self.chunk(seq, first)) // self.size) - len(seq.block_table)
        num_copied = sum(counts[block] > 1 for block in seq.block_table[first // self.size :])
        return not self.has_room_rules or max(num_new, 0) + num_copied > self.manager.num_blocks - len(counts)

    def num_kept(self, seq: Sequence) -> int:
        """Return how many blocks stay free for a running sequence when others start (rule 6)."""
        if self.policy.num_reserved_blocks is not Scheduler.num_reserved_blocks:
            return self.scheduler.num_reserved_blocks(seq) + len(self.forks[seq])
        num_tokens = min(seq.num_tokens + self.size, seq.max_num_tokens - 1)  # the last token is never computed
        return max(-(-num_tokens // self.size) - len(seq.block_table), 0) + len(self.forks[seq])

    def fits(self, seq: Sequence, victim: Sequence | None = None) -> bool:
        """Return whether a sequence fits beside those that run (rule 6), without a victim (rule 7)."""
        others = [other for other in self.scheduler.running if other not in (seq, victim)]
        held = {block for other in others for block in other.block_table}
        prefix = self.memory.prefix(seq)
        num_new = self.chunk(seq, len(prefix) * self.size)
        num_needed = -(-seq.num_tokens // self.size) - len(held.intersection(prefix)) + sum(map(self.num_kept, others))
        return (
            len(others) < self.config.max_num_seqs
            and (num_new == 1 or num_new <= self.budget)
            and num_needed <= self.manager.num_blocks - len(held)
        )

    # ---- checks

    def check_candidate(self, *, is_last: bool) -> None:
        """Check whether the last candidate started, just after the scheduler has decided it (rules 6 and 7)."""
        *before, seq = self.candidates
        victim, is_started = self.exchanges.get(seq), seq.status is SequenceStatus.RUNNING
        others = [other for other in (*self.running, *before) if other.status is SequenceStatus.RUNNING]
        others += [other for other in self.exchanges.values() if other is not None]
        is_passed = seq in self.refused
        for name, most in self.scheduler.limits.items():
            is_passed |= len({other.extras.get(name) for other in (*others, seq)} - {None}) > most
        assert is_started or is_passed or is_last, f"rule 6: no sequence may pass {seq.sequence_id}, which lacks room"
        assert not (is_started and is_last), f"the next of {names(self.waiting)} may start after {seq.sequence_id}"
        if self.has_room_rules:
            may_start = not is_passed and (self.fits(seq) or (victim is not None and self.fits(seq, victim)))
            assert is_started == may_start, (
                f"rule 6: sequence {seq.sequence_id} must {'start' if may_start else 'wait'}: {self.budget} prompt tokens and "
                f"{self.manager.num_free_blocks} blocks are left beside {names(self.scheduler.running)}"
            )
        if not is_started:
            is_asked = is_passed or seq in self.exchanges
            assert is_asked or not self.exchangeable(), f"rule 7: to_preempt must be called for sequence {seq.sequence_id}"
            return
        first = seq.num_computed_tokens
        num_new = self.chunk(seq, first)
        self.budget -= num_new if num_new > 1 else 0
        if self.has_room_rules:
            found = len(self.memory.prefix(seq)) * self.size
            assert first == found, f"sequence {seq.sequence_id} must start with {found} cached tokens, got {first}"
            assert len(seq.prefix_keys) == first // self.size, f"sequence {seq.sequence_id} must have the keys of its prefix"
        found = self.cached.get(seq, -1)
        assert found == first, f"sequence {seq.sequence_id} must start with {first} cached tokens for the observer, got {found}"

    def check_plan(self) -> None:
        """Check the plan and both queues (rules 1 to 5 and 7)."""
        plan, scheduler, limit = self.plan, self.scheduler, self.config.max_num_seqs
        if self.candidates and not self.is_exhausted:
            self.check_candidate(is_last=True)
        started = [seq for seq in self.candidates if seq.status is SequenceStatus.RUNNING]
        exchanged = [victim for seq, victim in self.exchanges.items() if seq in started and victim is not None]
        preempted = [*self.victims] or exchanged
        left = [seq for seq in self.running if seq not in preempted]
        has_place = len(self.running) < limit or issubclass(self.policy, PreemptingScheduler)
        may_ask = bool(self.waiting) and not self.victims and has_place
        assert self.is_asked == may_ask, f"rule 6: order_waiting must {'' if may_ask else 'not '}be called"
        if self.policy.order_waiting is Scheduler.order_waiting:
            _same("rule 1: the next to start", self.candidates, self.waiting[: len(self.candidates)])
        _same("the preempted sequences for the observer", self.preempted, preempted)
        _same("scheduler.running", scheduler.running, [*left, *started])
        chunks = self.chunks()[0]
        chunks = {seq: chunks[seq] for seq in left} | {seq: self.chunk(seq, seq.num_computed_tokens) for seq in started}
        num_places, waiting_forks = limit - len(scheduler.running), list[Sequence]()
        self.starting: dict[Sequence, list[Sequence]] = {}
        for seq, num_new in chunks.items():
            if num_new == seq.num_new_tokens:
                self.starting[seq], more = self.forks[seq][:num_places], self.forks[seq][num_places:]
                num_places, waiting_forks = num_places - len(self.starting[seq]), waiting_forks + more
            _same(f"the forks of {seq.sequence_id}", seq.forks, self.starting.get(seq, self.forks[seq]))
        waiting = [*waiting_forks, *reversed(preempted), *(seq for seq in self.waiting if seq not in started)]
        _same("scheduler.waiting", scheduler.waiting, waiting)
        expected = sorted([pair for pair in chunks.items() if pair[1]], key=lambda pair: pair[1] > 1)
        found = [(item.sequence, item.num_new_tokens) for item in plan.scheduled]
        assert found == expected, (
            f"rules 2 and 3: a step must compute {_with_numbers(expected)}, within {self.config.max_num_batched_tokens} prompt "
            f"tokens and up to multiples of {self.config.chunk_grid}, got {_with_numbers(found)}"
        )

    def commit(self) -> None:
        """Commit the plan, and check what is counted, forked and cached."""
        scheduler = self.scheduler
        running = [other for seq in scheduler.running for other in (seq, *self.starting.get(seq, ()))]
        ends = {item.sequence: item.sequence.num_computed_tokens + item.num_new_tokens for item in self.plan.scheduled}
        num_keys = {seq: len(seq.prefix_keys) for seq in ends}
        scheduler.commit(self.plan)
        _same("rule 5: scheduler.running", scheduler.running, running)
        cached = self.memory.cached() if self.has_room_rules else {}
        for seq, end in ends.items():
            num_full = min(end, len(seq.token_ids)) // self.size
            if not (seq.is_answered and self.manager.enable_prefix_caching):
                num_full = num_keys[seq]
            for other in (seq, *self.starting.get(seq, ())):
                name, found = other.sequence_id, other.num_computed_tokens
                assert found == end, f"sequence {name} must have {end} computed tokens, got {found}"
                if self.has_room_rules:
                    found, new = len(other.prefix_keys), self.memory.full_blocks(seq)[num_keys[seq] : num_full]
                    assert found == num_full, f"sequence {name} must have the keys of {num_full} full blocks, got {found}"
                    assert cached.keys() >= {*new}, f"the prefix cache must have the blocks that sequence {name} filled"


def run_step(
    scheduler: Scheduler, memory: Memory, unfinished: list[Sequence], speculator: "Speculator | None" = None
) -> StepPlan:
    """Schedule, compute and commit a step. The caller samples its rows.

    Args:
        speculator: adds drafts to the plan. None: there are none.

    Raises:
        AssertionError: the step breaks a rule, which the message states.
    """
    step = _ObservedStep(scheduler, memory)
    is_progress = step.plan.scheduled or step.preempted or memory.unread
    assert is_progress, f"a step must compute or preempt a sequence of {names(unfinished)}"
    step.check_plan()
    if speculator is not None:
        step.plan = speculator.add_drafts(step.plan, scheduler)
    memory.copy(step.plan.block_copies)
    ends = {item.sequence: item.sequence.num_computed_tokens + item.num_packed_tokens for item in step.plan.scheduled}
    for item in step.plan.scheduled:
        seq = item.sequence
        num_blocks, table = -(-ends[seq] // memory.manager.block_size), seq.block_table
        assert len(table) >= num_blocks, f"sequence {seq.sequence_id} must have {num_blocks} blocks, got {table}"
        seq.token_ids += item.draft_token_ids
        memory.write(seq, seq.num_computed_tokens, ends[seq])
    for item in step.plan.scheduled:
        memory.check(item.sequence, ends[item.sequence])
        del item.sequence.token_ids[len(item.sequence.token_ids) - len(item.draft_token_ids) :]
    step.commit()
    return step.plan


def names(sequences: Iterable[Sequence]) -> str:
    return ", ".join(seq.sequence_id for seq in sequences)


def _with_numbers(pairs: Iterable[tuple[Sequence, int]]) -> str:
    return ", ".join(f"{number} of {seq.sequence_id}" for seq, number in pairs) or "nothing"


def _same(what: str, found: Iterable[Sequence], expected: Iterable[Sequence]) -> None:
    assert [*found] == [*expected], f"{what} must be {names(expected) or 'empty'}, got {names(found) or 'none'}"
