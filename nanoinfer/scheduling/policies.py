"""Scheduling orders other than first come, first served: the policies of LLM(scheduling_policy=...), and a base for others.

PriorityScheduler and DeadlineScheduler override two methods. Both keep the order of arrival among equals, and preempt the
sequence that would start last. A running sequence is preempted only when blocks run out, as in vLLM, and never for a waiting
sequence. Under constant load a request may wait forever.
"""

from collections import deque

from nanoinfer.scheduling.scheduler import Scheduler, Selection
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus


class PriorityScheduler(Scheduler):
    """Runs sequences with the lowest Sequence.priority first."""

    reads_priority = True

    def order_waiting(self, waiting: deque[Sequence]) -> list[Sequence]:
        return sorted(waiting, key=lambda seq: seq.priority)

    def choose_victim(self, running: list[Sequence], seq: Sequence) -> Sequence:
        return max(reversed(running), key=lambda seq: seq.priority)


class DeadlineScheduler(Scheduler):
    """Runs sequences with the earliest Sequence.deadline first. Requests without a timeout come last."""

    def order_waiting(self, waiting: deque[Sequence]) -> list[Sequence]:
        return sorted(waiting, key=lambda seq: seq.deadline)

    def choose_victim(self, running: list[Sequence], seq: Sequence) -> Sequence:
        return max(reversed(running), key=lambda seq: seq.deadline)


POLICIES: dict[str, type[Scheduler]] = {"priority": PriorityScheduler, "deadline": DeadlineScheduler}


class PreemptingScheduler(Scheduler):
    """May preempt a running sequence for a waiting one, as a subclass of yours chooses with to_preempt.

    Rule 7: the waiting sequence then starts in the same step, before any other, so that the preempted sequence does not take
    the room again. A start preempts at most one sequence, which has a new token since its own start, so that no two sequences
    preempt each other without progress.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._num_tokens_at_start: dict[Sequence, int] = {}  # of sequences that have started. A fork has none

    def to_preempt(self, running: list[Sequence], waiting: list[Sequence]) -> Sequence | None:
        """Choose a running sequence that makes room for waiting[0]. None: waiting[0] waits.

        Args:
            running: the sequences that may be chosen (rule 7), in the order in which they started.
            waiting: the next sequence to start, which lacks room, then all others.
        """
        return None

    def may_be_preempted(self, seq: Sequence) -> bool:
        """Return whether a running sequence has a new token since its start."""
        return seq.num_tokens > self._num_tokens_at_start.get(seq, 0)

    # ---- inside

    def _start_waiting(self, selection: Selection) -> None:
        try:
            super()._start_waiting(selection)
        finally:  # not earlier, because the policy iterates over `waiting`
            self.waiting.extendleft(selection.preempted)

    def has_place(self) -> bool:
        return True  # or to_preempt may make one

    def _start(self, selection: Selection, seq: Sequence) -> bool:
        is_started = super().has_place() and super()._start(selection, seq)
        if is_started or self._start_instead(selection, seq):
            self._num_tokens_at_start[seq] = seq.num_tokens
            return True
        return False

    def _start_instead(self, selection: Selection, seq: Sequence) -> bool:
        """Start a sequence in place of the sequence that to_preempt chooses. Return False if this makes too little room."""
        running = [*filter(self.may_be_preempted, self.running)]
        others = [other for other in self.waiting if other is not seq and other.status is SequenceStatus.WAITING]
        if not running or (victim := self.to_preempt(running, [seq, *others])) is None:
            return False
        assert victim in running, "to_preempt returns one of the running sequences that it is given"
        prefix = self._prefix_of(seq)
        num_new = self.next_chunk(seq, len(prefix) * self.block_manager.block_size)
        num_kept_free = selection.num_kept_free - self.num_reserved_blocks(victim) - len(victim.forks)
        num_missing = num_kept_free - self.block_manager.num_freed_blocks(victim, prefix)
        if num_new > 1 and selection.budget < num_new:  # a victim has a single new token, which leaves no budget
            return False
        if not self.block_manager.can_start(seq.num_tokens, prefix, num_kept_free=num_missing):
            return False
        waiting, self.waiting = self.waiting, deque()  # not into the queue over which the policy iterates
        self._preempt(victim)
        self.waiting = waiting
        selection.drop(victim)
        selection.num_kept_free = num_kept_free
        assert super()._start(selection, seq), "there is room, as was computed"
        return True

    def finish(self, seq: Sequence) -> None:
        super().finish(seq)
        self._num_tokens_at_start.pop(seq, None)
