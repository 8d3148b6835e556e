"""Scheduling orders other than first come, first served (LLM(scheduling_policy=...)): Schedulers that override two methods.

Both keep the order of arrival among equals, and preempt the sequence that would start last. A running sequence is preempted
only when blocks run out, as in vLLM, and never for a waiting sequence. Under constant load a request may wait forever.
"""

from collections import deque

from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence


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
