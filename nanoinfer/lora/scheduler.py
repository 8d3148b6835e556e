"""A scheduler that starts no more adapters than fit into memory. Pure bookkeeping, as scheduling/ is."""

from collections import deque
from collections.abc import Iterator

from nanoinfer.config import EngineConfig
from nanoinfer.errors import UnsupportedError, check_integer
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus


def with_adapters(scheduler: type[Scheduler], config: EngineConfig) -> type[Scheduler]:
    """Return the scheduler, in which at most max_loras adapters run at a time.

    Raises: InvalidValueError: a limit below 1. UnsupportedError: several ranks.
    """
    check_integer("max_loras", config.max_loras, 1, None, ">= 1")
    check_integer("max_lora_rank", config.max_lora_rank, 1, None, ">= 1")
    if config.tensor_parallel_size > 1:
        raise UnsupportedError("enable_lora=True needs tensor_parallel_size=1; for several ranks use LLM(lora=path)")
    return type(scheduler.__name__, (AdapterScheduler, scheduler), {"max_loras": config.max_loras})


class AdapterScheduler(Scheduler):
    """A sequence waits while it needs one adapter more than fit. Those behind it may pass it, as in vLLM."""

    max_loras: int

    def order_waiting(self, waiting: deque[Sequence]) -> Iterator[Sequence]:
        running = {seq.adapter for seq in self.running} - {None}
        for seq in super().order_waiting(waiting):
            if seq.adapter is None or seq.adapter in running or len(running) < self.max_loras:
                yield seq
                if seq.adapter is not None and seq.status is SequenceStatus.RUNNING:
                    running.add(seq.adapter)
