"""The small worlds that the tests explore, and in which the explorer finds a changed scheduler (mutants.py). Without torch."""

from nanoinfer.scheduling.policies import PreemptingScheduler, PriorityScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer_lab.testing.schedules import InvariantError, World, check_scheduler


class PreemptsAlways(PreemptingScheduler):
    """The oldest that may be preempted makes room for anybody."""

    def to_preempt(self, running, waiting):
        return running[0]


class StartsShortPrompts(Scheduler):
    def may_start(self, seq):
        return len(seq.prompt_token_ids) == 1


SMALL = {"num_requests": 2, "num_blocks": 3, "max_tokens": 2}
LENGTHS = {"num_token_ids": 1, "num_forks": 0, "num_aborts": 0}  # prompts differ in nothing else
WORLDS = {  # the smallest first
    "adapters": (Scheduler, World(**LENGTHS, num_salts=3, max_adapters=1, max_num_seqs=3, max_prompt_len=2, max_tokens=1)),
    "exchanges": (PreemptsAlways, World(**SMALL | {"num_blocks": 4}, num_forks=0, num_aborts=0)),
    "chunks": (Scheduler, World(**SMALL, chunk_size=3, num_forks=0)),  # a prefix hit ends inside a chunk
    "drafts": (Scheduler, World(**SMALL | {"max_tokens": 4}, num_speculative_tokens=2, num_forks=0, max_prompt_len=2)),
    "readers": (Scheduler, World(**SMALL, num_readers=1, num_forks=0, max_prompt_len=3)),
    "without-cache": (Scheduler, World(**LENGTHS, enable_prefix_caching=False)),
    "resets": (Scheduler, World(**SMALL, num_resets=1, num_forks=0, async_scheduling=True, max_prompt_len=2)),
    "forks": (Scheduler, World(num_requests=2, num_forks=2, max_num_seqs=3, max_prompt_len=3, num_aborts=0, num_token_ids=1)),
    "salts": (Scheduler, World(**SMALL, num_salts=2, num_forks=0)),
    "priority": (PriorityScheduler, World(**SMALL, num_ranks=2, num_forks=0)),
    "async": (Scheduler, World(**SMALL, async_scheduling=True, max_prompt_len=3)),
    "budget": (
        Scheduler,
        World(
            **LENGTHS, num_blocks=12, max_num_seqs=3, chunk_size=3, max_num_batched_tokens=4, max_prompt_len=6, max_tokens=1,
            num_resets=1,
        ),
    ),
    "exchanged-chunks": (PreemptsAlways, World(**LENGTHS, chunk_size=3, max_num_batched_tokens=4, max_prompt_len=6)),
}  # fmt: skip


def check_all() -> None:
    """Explore each world, and one in which a class must be told that it starts nothing."""
    for scheduler_cls, world in WORLDS.values():
        check_scheduler(scheduler_cls, world=world)
    try:
        check_scheduler(StartsShortPrompts, world=World(num_requests=1))
    except InvariantError as broken:
        assert "the class raised NanoinferError" in str(broken)  # noqa: PT017  # mutants.py runs without pytest
    else:
        raise AssertionError("StartsShortPrompts starts no other prompts")
