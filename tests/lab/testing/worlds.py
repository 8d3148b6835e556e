"""The small worlds that the tests explore. Without torch."""

from nanoinfer.scheduling.policies import PreemptingScheduler, PriorityScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer_lab.testing.schedules import World


class PreemptsAlways(PreemptingScheduler):
    """The oldest that may be preempted makes room for anybody."""

    def to_preempt(self, running, waiting):
        return running[0]


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
