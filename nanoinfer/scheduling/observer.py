"""What scheduling tells those who watch it: which blocks change their owner, and what a step contains."""

from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING, Literal

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from nanoinfer.scheduling.scheduler import Scheduler

Change = Literal["shared", "allocated", "cached", "released", "freed"]  # by a prefix hit, ..., by a window, with the sequence


class SchedulingObserver:
    """Sees what happens, and changes nothing. Each method does nothing, until a subclass overrides it."""

    def blocks_changed(self, change: Change, seq: Sequence, blocks: ListLike[int], group: int = 0) -> None: ...
    def blocks_forked(self, parent: Sequence, child: Sequence, blocks: ListLike[int]) -> None: ...
    def block_copied(self, seq: Sequence, source: int, target: int) -> None: ...  # before the sequence writes into it
    def block_evicted(self, block: int) -> None: ...  # from the prefix cache
    def scheduling_begun(self) -> None: ...  # of the next step
    def sequence_started(self, seq: Sequence, num_cached_tokens: int) -> None: ...  # also after a preemption
    def sequence_preempted(self, seq: Sequence) -> None: ...  # also after a step has failed
    def step_scheduled(self, plan: StepPlan, scheduler: "Scheduler") -> None: ...  # also a plan without sequences


NOBODY = SchedulingObserver()
