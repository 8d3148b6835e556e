"""Decide which sequences run in a step, and how many tokens of each. This is pure bookkeeping, without tensors.

In: sequences, as they arrive. Out: a StepPlan per step. Scheduler has the rules 1 to 4, in the order in which they are applied.
Two more are about several answers and about what waits, and qualify rule 1:

5. When a prompt with several answers (n > 1) has been computed, its forks start. Each samples its first token from the prompt's
   last row and shares its blocks. Forks for which max_num_seqs leaves no room wait at the head of the queue and compute the end
   of the prompt again.
6. A waiting sequence starts only if there are blocks for all of its tokens and for what the running sequences will soon
   request: their known tokens, another block for each that may grow so far, and a block for each fork. No sequence starts in a
   step in which rule 4 preempts. A sequence that would exceed one of `limits` waits, and others may pass it.

How a sequence's tokens are cut into steps changes the last bits of its numbers. Rule 3 keeps other requests from moving the
cuts, but a prefix hit skips the first cuts, and a preempted sequence computes its output as if it were prompt. With
batch_invariant the cuts change no bit, because the executor computes the attention of each query alone.

The scheduler always makes progress: the oldest running sequence can preempt all others and fits alone, because max_model_len
is at most what the pool holds, and if nothing runs, every block is free and the head of the queue starts.

A subclass, LLM(scheduler_cls=...), may override four methods: order_waiting (rule 1), choose_victim (rule 4), may_start and
num_reserved_blocks (rule 6). policies.py has two such classes, and PreemptingScheduler, whose subclasses also preempt a running
sequence for a waiting one (rule 7). A policy cannot change a token or lose a block. It only decides which sequence waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from nanoinfer.config import EngineConfig, SchedulerConfig
from nanoinfer.errors import InvalidTypeError, NanoinferError
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import NOBODY, SchedulingObserver
from nanoinfer.scheduling.prefix_index import Prefix
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of


@dataclass(slots=True)
class Selection:
    """What a step will contain, while schedule() decides it."""

    budget: int  # the tokens that are left for sequences with more than one new token
    num_kept_free: int = 0  # the blocks that stay free for the running sequences when others start
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: dict[Sequence, list[tuple[int, int]]] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)

    def drop(self, victim: Sequence) -> None:
        """Note that a sequence was preempted, which this step may already have scheduled."""
        self.preempted.append(victim)
        if self.copies.pop(victim, None) is not None:
            self.scheduled = [item for item in self.scheduled if item.sequence is not victim]


class Scheduler:
    """Owns the two queues, and every sequence's status, ids and counts of tokens.

    1. First come, first served. A running sequence is older than every waiting one.
    2. A sequence with one new token always runs. max_num_batched_tokens limits the tokens of all others.
    3. A prompt is cut at absolute multiples of the chunk grid, never at the remaining budget, so that other requests cannot
       move its cuts. A chunk runs as a whole or waits, and while it waits, no younger prompt passes it.
    4. When blocks run out, the running sequence that started last is preempted. Its blocks are freed, it waits at the head of
       the queue, and it later recomputes its tokens, except for those that the prefix cache still holds.

    Attributes, which a subclass reads and does not change:
        waiting: preempted sequences, then new sequences in the order of their arrival.
        running: the running sequences, in the order in which they started.
        limits: the most values that an extra (Sequence.extras) may have among the running sequences, by the extra's name.
        reads_priority: whether the order depends on Sequence.priority. If False, requests with a priority are refused.
        clock: returns the time in seconds, as in Sequence.arrival_time and deadline. A simulation sets a virtual clock.
    """

    reads_priority = False
    limits: Mapping[str, int] = MappingProxyType({})
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, observer: SchedulingObserver = NOBODY) -> None:
        self.config, self.block_manager = config, block_manager
        self.observer = observer
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    # ---- for subclasses to override

    def order_waiting(self, waiting: deque[Sequence]) -> Iterable[Sequence]:
        """Return waiting sequences in the order in which they should start. It is called only if a sequence may start.

        The first sequence that lacks blocks or tokens of the budget ends the starts, so no later one passes it. Sequences
        that are left out keep waiting. If nothing runs, the order must contain at least one sequence that may_start accepts.
        """
        return waiting

    def may_start(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may start in this step if there is room. If False, the next sequence may start."""
        return True

    def num_reserved_blocks(self, seq: Sequence) -> int:
        """Return how many free blocks to keep for a running sequence when others start, beyond those for its forks.

        More blocks mean fewer preemptions, and fewer sequences at a time. The last token of a sequence is never computed.
        """
        limits = seq.num_tokens + self.block_manager.block_size, seq.max_num_tokens - 1
        return max(min(map(self.block_manager.num_blocks_for, limits)) - self.block_manager.num_held_blocks(seq), 0)

    def choose_victim(self, running: list[Sequence], seq: Sequence) -> Sequence:
        """Choose the running sequence to preempt so that `seq` gets its next block. It may be `seq`, which runs too."""
        return running[-1]

    # ---- queries and changes

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. The caller has checked that it fits when it runs alone."""
        assert self.block_manager.num_blocks_for(seq.max_num_tokens) <= self.block_manager.num_blocks
        self.waiting.append(seq)
        for fork in seq.forks:
            fork.status = SequenceStatus.PENDING

    def schedule(self) -> StepPlan:
        """Decide one step, and give every scheduled sequence its blocks."""
        self.observer.scheduling_begun()
        selection = Selection(self.config.max_num_batched_tokens)
        self._continue_running(selection)
        if self.waiting and not selection.preempted:
            self._start_waiting(selection)
        self._make_forks_wait(selection.scheduled)
        single = [item for item in selection.scheduled if item.num_new_tokens == 1]  # each group by arrival
        scheduled = [*single, *(item for item in selection.scheduled if item.num_new_tokens > 1)]
        plan = StepPlan(tuple(scheduled), rows_of(scheduled), tuple(chain.from_iterable(selection.copies.values())))
        self.observer.step_scheduled(plan, self)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Count the tokens of a launched plan as cached and those that it samples as tokens, and cache full blocks.

        The forward pass may still be in flight, because later launches run after it.
        """
        manager, block_size = self.block_manager, self.block_manager.block_size
        for item in plan.scheduled:
            seq = item.sequence
            num_computed = seq.num_computed_tokens = seq.num_computed_tokens + item.num_new_tokens
            fills_block = manager.enable_prefix_caching and num_computed // block_size > len(seq.prefix_keys)
            if (fills_block and len(seq.token_ids) // block_size > len(seq.prefix_keys)) or manager.acts_each_step:
                manager.cache_finished_blocks(seq, min(num_computed, len(seq.token_ids)))  # a sampled token has no id yet
            if seq.forks and seq.num_new_tokens == 0:
                self._fork(seq)
        for seq in dict.fromkeys([seq for seq, _ in plan.rows]):  # each sequence once, whatever the number of its drafts
            seq.num_tokens += 1

    def append(self, seq: Sequence, token_id: int) -> None:
        """Append a sampled token, which commit has counted. A step that accepts drafts has several for a sequence."""
        seq.token_ids.append(token_id)
        if len(seq.token_ids) > seq.num_tokens:
            seq.num_tokens += 1
            seq.num_computed_tokens += 1  # the token before was an accepted draft, which the step has computed

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence, whatever its status, and free its blocks. A second call does nothing."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self.block_manager.free(seq)
        seq.num_computed_tokens, seq.status = 0, SequenceStatus.FINISHED
        seq.as_decode = None  # it refers to the sequence, whose memory would wait for the garbage collector

    def next_chunk(self, seq: Sequence, start: int) -> int:
        """Return the number of tokens from `start` up to the next multiple of the chunk grid or the sequence's end."""
        grid = self.config.chunk_grid
        return min(seq.num_tokens - start, grid - start % grid)

    def restart(self) -> None:
        """Requeue every running sequence in order after a failed step, so that tokens in flight are sampled again."""
        for seq in self.running[::-1]:
            self._preempt(seq)
        for seq in self.waiting:
            seq.num_tokens = len(seq.token_ids)

    # ---- inside

    def _continue_running(self, selection: Selection) -> None:
        """Schedule the running sequences, oldest first, and preempt where blocks run out."""
        for seq in self._left_to_schedule(selection):
            num_new = self.next_chunk(seq, seq.num_computed_tokens)
            if seq.status is not SequenceStatus.RUNNING:
                pass  # it was preempted for an earlier sequence of this loop
            elif num_new > 1 and selection.budget < num_new:
                selection.budget = 0  # it waits, and no younger prompt passes it
            elif self._make_room(seq, num_new, selection):
                self._select(selection, seq, num_new)

    def _left_to_schedule(self, selection: Selection) -> list[Sequence]:
        """Return the running sequences that are still to be scheduled: those that have a token to compute.

        If each has a single one, and blocks suffice for all, they are scheduled here in less time, and none is left.
        """
        slots = self.block_manager.next_slots(self.running)
        if slots is None:
            return [seq for seq in self.running if seq.num_tokens < seq.max_num_tokens or seq.num_tokens == len(seq.token_ids)]
        for seq, slot in zip(self.running, slots, strict=True):
            if seq.num_tokens >= seq.max_num_tokens and seq.num_tokens > len(seq.token_ids):
                pass  # its last token is in flight
            elif slot:
                seq.as_decode = seq.as_decode or ScheduledSequence(seq, 1)
                selection.scheduled += (seq.as_decode,)
                selection.copies[seq] = []
            else:
                self._select(selection, seq, 1)
        return []

    def _start_waiting(self, selection: Selection) -> None:
        """Start waiting sequences in the policy's order, until a sequence does not fit."""
        if not self.has_place():
            return
        selection.num_kept_free = sum([self.num_reserved_blocks(seq) + len(seq.forks) for seq in self.running])
        in_use = {name: {seq.extras.get(name) for seq in self.running} for name in self.limits}
        started: list[Sequence] = []
        try:
            for seq in self.order_waiting(self.waiting):
                if not self.has_place():
                    break
                assert seq.status is SequenceStatus.WAITING, "order_waiting returns waiting sequences, each once"
                values = {name: of_running | {seq.extras.get(name)} for name, of_running in in_use.items()}
                if any(len(values[name] - {None}) > most for name, most in self.limits.items()) or not self.may_start(seq):
                    continue
                started.append(seq)
                if not self._start(selection, seq):
                    started.pop()
                    break
                in_use = values
        finally:  # also if the policy raises
            for seq in started:
                self.waiting.remove(seq)
        if not self.running and self.block_manager.num_free_blocks == self.block_manager.num_blocks:
            raise NanoinferError(
                f"{type(self).__name__} starts none of {len(self.waiting)} waiting sequences, and none runs; order_waiting "
                "must return one that may_start accepts"
            )

    def has_place(self) -> bool:
        """Return whether another sequence may run."""
        return len(self.running) < self.config.max_num_seqs

    def _start(self, selection: Selection, seq: Sequence) -> bool:
        """Start a sequence, which the caller removes from `waiting`. Return False if there is no room for it."""
        prefix = self._prefix_of(seq)
        num_cached = len(prefix) * self.block_manager.block_size
        num_new = self.next_chunk(seq, num_cached)
        if num_new > 1 and selection.budget < num_new:
            return False
        if not self.block_manager.can_start(seq.num_tokens, prefix, num_kept_free=selection.num_kept_free):
            return False
        self.running.append(seq)
        seq.status = SequenceStatus.RUNNING
        self.block_manager.start(seq, prefix)
        seq.num_computed_tokens = num_cached
        self.observer.sequence_started(seq, num_cached)
        self._select(selection, seq, num_new)
        selection.num_kept_free += self.num_reserved_blocks(seq) + len(seq.forks)
        return True

    def _prefix_of(self, seq: Sequence) -> Prefix:
        return Prefix() if seq.needs_all_rows else self.block_manager.match_prefix(seq.token_ids, seq.cache_salt)

    def _select(self, selection: Selection, seq: Sequence, num_new_tokens: int) -> None:
        """Schedule the sequence's next tokens, for which there are free blocks."""
        selection.copies[seq] = self.block_manager.allocate(seq, num_new_tokens)
        selection.scheduled.append(ScheduledSequence(seq, num_new_tokens))
        selection.budget -= num_new_tokens if num_new_tokens > 1 else 0

    def _make_room(self, seq: Sequence, num_new_tokens: int, selection: Selection) -> bool:
        """Preempt sequences until the next tokens of `seq` have blocks. Return False if `seq` itself was preempted."""
        while not self.block_manager.can_allocate(seq, num_new_tokens):
            victim = self.choose_victim(self.running, seq)
            assert victim.status is SequenceStatus.RUNNING, "choose_victim returns a running sequence"
            self._preempt(victim)
            selection.drop(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Requeue a running sequence."""
        self.running.remove(seq)
        self.block_manager.free(seq)
        seq.num_computed_tokens, seq.status = 0, SequenceStatus.WAITING
        self.observer.sequence_preempted(seq)
        self.waiting.appendleft(seq)

    def _make_forks_wait(self, scheduled: list[ScheduledSequence]) -> None:
        """Queue those forks of prompts that end in this step for which max_num_seqs leaves no room."""
        num_startable = self.config.max_num_seqs - len(self.running)
        too_many: list[Sequence] = []
        for item in scheduled:
            seq = item.sequence
            if seq.forks and item.num_new_tokens == seq.num_new_tokens:
                seq.forks, waiting = seq.forks[:num_startable], seq.forks[num_startable:]
                num_startable -= len(seq.forks)
                too_many += waiting
        self.waiting.extendleft(reversed(too_many))
        for fork in too_many:
            fork.status = SequenceStatus.WAITING

    def _fork(self, parent: Sequence) -> None:
        """Start the further answers of a computed prompt, directly after the first, because they have the same age."""
        forks, parent.forks = parent.forks, []
        index = self.running.index(parent) + 1
        self.running[index:index] = forks
        for fork in forks:
            self.block_manager.fork(parent, fork)
            fork.num_computed_tokens = parent.num_computed_tokens
            fork.status = SequenceStatus.RUNNING


def scheduling_classes(config: EngineConfig) -> tuple[type[Scheduler], type[BlockManager]]:
    """Return the classes that schedule sequences and manage blocks. Raises: InvalidTypeError for a class of another kind."""
    scheduler, block_manager = config.scheduler.scheduler_cls or Scheduler, config.cache.block_manager_cls or BlockManager
    for name, given, base in ("scheduler_cls", scheduler, Scheduler), ("block_manager_cls", block_manager, BlockManager):
        if not issubclass(given, base):
            raise InvalidTypeError(f"{name} must be a subclass of {base.__name__} (nanoinfer/scheduling), got {given}")
    if config.scheduler.scheduling_policy == "fcfs" and not hasattr(scheduler, "to_preempt"):
        return scheduler, block_manager
    from nanoinfer.scheduling.policies import POLICIES, PreemptingScheduler

    if hasattr(scheduler, "to_preempt") and not issubclass(scheduler, PreemptingScheduler):
        raise InvalidTypeError(
            f"scheduler_cls must be a subclass of PreemptingScheduler (nanoinfer/scheduling/policies.py), because it has "
            f"to_preempt, got {scheduler}"
        )
    return POLICIES.get(config.scheduler.scheduling_policy, scheduler), block_manager
