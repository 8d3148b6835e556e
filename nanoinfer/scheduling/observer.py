"""What scheduling tells those who watch it: which blocks change hands, and what a step contains."""

from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan

if TYPE_CHECKING:
    from nanoinfer.scheduling.scheduler import Scheduler


class SchedulingObserver:
    """Is told what happens, and changes nothing. Each method does nothing, until a subclass overrides it."""

    def blocks_shared(self, seq: Sequence, blocks: ListLike[int], group: int) -> None: ...  # a prefix hit, in a KV group
    def blocks_allocated(self, seq: Sequence, blocks: ListLike[int], group: int) -> None: ...  # the newest of its table
    def block_copied(self, seq: Sequence, source: int, target: int) -> None: ...  # before the sequence writes into it
    def block_evicted(self, block: int) -> None: ...  # from the prefix cache
    def blocks_cached(self, seq: Sequence, blocks: ListLike[int]) -> None: ...  # full blocks, in the prefix cache now
    def blocks_forked(self, parent: Sequence, child: Sequence, blocks: ListLike[int]) -> None: ...
    def blocks_freed(self, seq: Sequence) -> None: ...  # those of its tables, which are about to be emptied
    def blocks_released(self, seq: Sequence, blocks: ListLike[int]) -> None: ...  # which its windows have left
    def step_scheduled(self, plan: StepPlan, scheduler: "Scheduler") -> None: ...  # also a plan without sequences


NOBODY = SchedulingObserver()
