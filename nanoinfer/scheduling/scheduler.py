"""Which sequences run this step, and how many tokens of each. Pure bookkeeping: no tensors here.

In: sequences, as they arrive. Out: a SchedulerPlan per step. The rules, in the order they are applied:

1. First come, first served, by arrival. What runs is older than what waits, save answers that wait for a place (rule 5).
2. A sequence with one new token always gets its row: that is a decode step, or the rest of a prompt that is one token long.
   `max_num_batched_tokens` limits the tokens of the others.
3. A prompt is cut at absolute multiples of the chunk grid, never at whatever budget is left, so that other requests cannot
   move a sequence's boundaries. A chunk runs whole or waits, and then no younger prompt passes it.
4. When blocks run out, the youngest running sequence is preempted: its blocks are freed, it waits at the head of the queue, and
   later recomputes what it had (less what the prefix cache still holds).
5. When a prompt of several answers (n > 1) is computed, the others fork: each draws its first token from the prompt's last row
   and shares its blocks. Those that max_num_seqs leaves no room for wait at the head of the queue, to compute the prompt's end
   for themselves.
6. A waiting sequence starts only when there are blocks for all of its tokens, and for what those that run will soon ask for:
   the rest of their known tokens, one more for each that may grow so far, and one for each fork. And never in a step that
   preempted one.

How a sequence's tokens are cut into steps shows in the last bits of its numbers. Rule 3 keeps other requests from moving the
cuts, but two things still do: a prefix hit starts behind the first cuts, and a preempted sequence computes its output as if
it were prompt. With batch_invariant neither does: only whole chunks of prompts are put into the prefix cache and taken from it,
and a sequence that starts again replays its prompt by chunks and its output token by token, as it was made.

Why it always moves on: the oldest running sequence can preempt all others, and alone it fits, since max_model_len is no more
than the pool holds; and with nothing running every block is free, so the head of the queue starts.
"""

import math
from collections import deque
from dataclasses import dataclass

from nanoinfer.config import SchedulerConfig
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.tracing import StepScheduled, Tracer


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """This step computes the next num_new_tokens of the sequence's tokens that are not in the cache yet."""

    sequence: Sequence
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Packed tokens start .. stop - 1 are the tokens of the sequence's prompt from `position` on."""

    sequence: Sequence
    start: int
    stop: int
    position: int


@dataclass(frozen=True, slots=True)
class SchedulerPlan:
    """One step.

    scheduled: single-token rows first, then prompt chunks, each group oldest first. Packed index 0 is the first token of the
    first of them. rows: the (sequence, packed index) pairs that meet the LM head to draw a token; a chunk that does not end its
    prompt has none, and forks have the index of the sequence they come from. prompt_rows: the tokens of prompts whose
    log-probabilities were asked for. block_copies: (from, to) blocks the runner must copy before the forward pass.
    """

    scheduled: tuple[ScheduledSequence, ...]
    rows: tuple[tuple[Sequence, int], ...]
    prompt_rows: tuple[PromptRows, ...]
    block_copies: tuple[tuple[int, int], ...]
    preempted: tuple[Sequence, ...]
    step: int = -1  # the scheduler counts its own from 0

    @property
    def num_decode_tokens(self) -> int:
        return sum(item.num_new_tokens == 1 for item in self.scheduled)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled) - self.num_decode_tokens


class Scheduler:
    """Owns the two queues and, with commit, every sequence's num_computed_tokens."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager, tracer: Tracer | None = None) -> None:
        self.config = config
        self.block_manager = block_manager
        self.tracer = tracer
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._num_steps = 0
        self._untold: list[Sequence] = []  # preempted where nobody ran: the next StepScheduled tells of them

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. The caller has checked that it can fit when it runs alone."""
        assert seq.max_num_tokens <= self.block_manager.num_blocks * self.block_manager.block_size
        self._waiting.append(seq)
        for fork in seq.forks:
            fork.status = SequenceStatus.PENDING

    def schedule(self) -> SchedulerPlan:
        """Decide one step, and give every scheduled sequence its blocks."""
        scheduled: list[ScheduledSequence] = []
        copies: list[tuple[int, int]] = []
        preempted: list[Sequence] = []
        budget = self.config.max_num_batched_tokens

        index = 0
        while index < len(self._running):
            seq = self._running[index]
            num_new = self.next_chunk(seq)
            if seq.num_pending_tokens and seq.num_tokens >= seq.max_num_tokens:
                pass  # the token that is on its way is its last
            elif num_new > 1 and budget < num_new:
                budget = 0  # it waits, and no younger prompt passes it
            elif self._make_room(seq, num_new, preempted):
                copies += self.block_manager.allocate(seq, num_new)
                scheduled.append(ScheduledSequence(seq, num_new))
                budget -= num_new if num_new > 1 else 0
            index += 1

        while self._waiting and not preempted and len(self._running) < self.config.max_num_seqs:
            seq = self._waiting[0]
            prefix = [] if seq.wants_prompt_logprobs else self.match_prefix(seq)  # those need the prompt computed as a whole
            num_reserved = sum(self._num_reserved_blocks(running) for running in self._running)
            if not self.block_manager.can_start(seq.num_tokens, prefix, num_kept_free=num_reserved):
                break
            num_cached = len(prefix) * self.block_manager.block_size
            num_new = self.next_chunk(seq, num_cached)
            if num_new > 1 and budget < num_new:
                break
            self.block_manager.start(seq, prefix)
            self._waiting.popleft()
            self._running.append(seq)
            seq.status = SequenceStatus.RUNNING
            seq.num_computed_tokens = num_cached
            if seq.num_preemptions == 0:
                seq.num_cached_tokens = num_cached
            copies += self.block_manager.allocate(seq, num_new)
            scheduled.append(ScheduledSequence(seq, num_new))
            budget -= num_new if num_new > 1 else 0

        self._make_forks_wait(scheduled)
        scheduled.sort(key=lambda item: item.num_new_tokens > 1)  # stable: each group stays in order of arrival
        plan = SchedulerPlan(
            tuple(scheduled), rows_of(scheduled), _prompt_rows(scheduled), tuple(copies), tuple(preempted), self._num_steps
        )
        self._num_steps += bool(scheduled)
        if self.tracer is not None:
            self._untold += preempted
        if self.tracer is not None and scheduled:
            untold, self._untold = self._untold, []
            self.tracer.emit(
                StepScheduled(
                    step=plan.step,
                    sequence_ids=tuple(item.sequence.sequence_id for item in plan.scheduled),
                    num_new_tokens=tuple(item.num_new_tokens for item in plan.scheduled),
                    running=tuple(seq.sequence_id for seq in self._running),
                    num_waiting=len(self._waiting),
                    num_free_blocks=self.block_manager.num_free_blocks,
                    preempted=tuple(seq.sequence_id for seq in untold),
                )
            )
        return plan

    def commit(self, plan: SchedulerPlan) -> None:
        """The forward pass is done, or under way: for all that follows, the plan's tokens are in the cache, and the blocks they
        filled can be found.
        """
        for item in plan.scheduled:
            item.sequence.num_computed_tokens += item.num_new_tokens
            self.block_manager.cache_finished_blocks(item.sequence, self.num_cacheable(item.sequence))
            if item.sequence.forks and item.sequence.num_new_tokens == 0:
                self._fork(item.sequence)

    def finish(self, seq: Sequence, *, has_failed: bool = False) -> None:
        """Take a sequence out, wherever it stands, and free its blocks. A second call does nothing.

        has_failed: its keys and values may not be numbers, so that no other prompt may find them.
        """
        if has_failed:
            self.block_manager.forget_cached(seq)
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        elif seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._forget(seq)
        seq.status = SequenceStatus.FINISHED

    def next_chunk(self, seq: Sequence, num_computed_tokens: int | None = None) -> int:
        """How many tokens bring the sequence from where it is (or from there) to the next multiple of the grid, or its end."""
        start = seq.num_computed_tokens if num_computed_tokens is None else num_computed_tokens
        grid, end = self.config.chunk_grid, seq.num_tokens
        if self.config.batch_invariant:
            num_prompt = len(seq.prompt_token_ids)
            end = num_prompt if start < num_prompt else start + 1
        return min(end - start, grid - start % grid)

    def match_prefix(self, seq: Sequence) -> list[tuple[int, int]]:
        """The blocks that the cache holds of the sequence's start; with batch_invariant, of whole chunks of its prompt."""
        prefix = self.block_manager.match_prefix(seq.token_ids)
        if self.config.batch_invariant:
            block_size = self.block_manager.block_size
            unit = math.lcm(self.config.chunk_grid, block_size)
            prefix = prefix[: min(len(prefix) * block_size, len(seq.prompt_token_ids)) // unit * unit // block_size]
        return prefix

    def num_cacheable(self, seq: Sequence) -> int:
        """How many of its computed tokens others may find; with batch_invariant, those of whole chunks of its prompt."""
        if not self.config.batch_invariant:
            return min(seq.num_computed_tokens, len(seq.token_ids))  # a block's tokens must be known to be found
        num_tokens = min(seq.num_computed_tokens, len(seq.prompt_token_ids))
        return num_tokens // self.config.chunk_grid * self.config.chunk_grid

    def restart(self) -> None:
        """A step has failed before its commit: whoever runs goes back to the queue, in order, and is computed again."""
        for seq in reversed(self._running):
            self._preempt(seq)
        self._running.clear()

    # ---- inside

    def _make_room(self, seq: Sequence, num_new_tokens: int, preempted: list[Sequence]) -> bool:
        """Preempt from the young end until the sequence's next tokens have blocks. False if it had to go itself."""
        while not self.block_manager.can_allocate(seq, num_new_tokens):
            youngest = self._running.pop()
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """The caller takes it out of _running, from the young end."""
        self._forget(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _num_reserved_blocks(self, seq: Sequence) -> int:
        """Blocks that a running sequence will soon ask for: for its known tokens, one more if it may grow so far, one for each
        fork. Its very last token is never computed.
        """
        num_for_known, num_for_all = map(self.block_manager.num_blocks_for, (seq.num_tokens, seq.max_num_tokens - 1))
        return max(min(num_for_known + 1, num_for_all) - len(seq.block_table), 0) + len(seq.forks)

    def _make_forks_wait(self, scheduled: list[ScheduledSequence]) -> None:
        """Of the prompts that end in this step, queue the answers that there is no place for."""
        num_places = self.config.max_num_seqs - len(self._running)
        for item in scheduled:
            seq = item.sequence
            if item.num_new_tokens == seq.num_new_tokens:
                seq.forks, too_many = seq.forks[:num_places], seq.forks[num_places:]
                num_places -= len(seq.forks)
                self._waiting.extendleft(reversed(too_many))
                for fork in too_many:
                    fork.status = SequenceStatus.WAITING

    def _fork(self, parent: Sequence) -> None:
        """Start the other answers of a prompt that has been computed: right behind the first, since they are as old."""
        forks, parent.forks = parent.forks, []
        place = self._running.index(parent) + 1
        self._running[place:place] = forks
        for fork in forks:
            self.block_manager.fork(parent, fork)
            fork.num_computed_tokens = parent.num_computed_tokens
            fork.status = SequenceStatus.RUNNING

    def _forget(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0


def rows_of(scheduled: list[ScheduledSequence]) -> tuple[tuple[Sequence, int], ...]:
    """Each sequence whose last known token is computed in this step, and its forks, with that token's packed index."""
    rows = []
    end = 0
    for item in scheduled:
        end += item.num_new_tokens
        if item.num_new_tokens == item.sequence.num_new_tokens:
            rows += [(seq, end - 1) for seq in (item.sequence, *item.sequence.forks)]
    return tuple(rows)


def _prompt_rows(scheduled: list[ScheduledSequence]) -> tuple[PromptRows, ...]:
    """The prompt tokens of this step that are followed by another prompt token, where their log-probabilities are wanted."""
    rows = []
    start = 0
    for item in scheduled:
        seq = item.sequence
        num = min(item.num_new_tokens, len(seq.prompt_token_ids) - 1 - seq.num_computed_tokens)
        if seq.wants_prompt_logprobs and num > 0:
            rows.append(PromptRows(seq, start, start + num, seq.num_computed_tokens))
        start += item.num_new_tokens
    return tuple(rows)
