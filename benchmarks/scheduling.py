"""Time the scheduler and the block manager alone: prefix hits, a prompt that waits, and decode steps. No model runs.

python -m benchmarks.scheduling

A time is the processor's, and the least of the repeats. It includes schedule() and commit(), not the text of requests. Python's
garbage collector is off, as in timeit, because its time depends on all objects of a process.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable

from nanoinfer.config import SchedulerConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence

NUM_PROMPTS, PROMPT_TOKENS, BLOCK_SIZE, VOCAB_SIZE = 64, 2000, 16, 150_000
NUM_STEPS = 64
ALL_BLOCKS = NUM_PROMPTS * (PROMPT_TOKENS + 2 * NUM_STEPS) // BLOCK_SIZE


def _prompts(num_shared: int) -> list[list[int]]:
    """Prompts of random tokens, of which the first ones are the same in all."""
    rng = random.Random(0)
    shared, *others = [[rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS + 1)]
    return [shared[:num_shared] + other[num_shared:] for other in others]


def _scheduler(num_blocks: int = ALL_BLOCKS) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=NUM_PROMPTS, max_num_batched_tokens=NUM_PROMPTS * PROMPT_TOKENS)
    return Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE))


def _step(scheduler: Scheduler) -> float:
    """Run a step, append a token to each sequence that samples, and return the seconds of the scheduler."""
    start = time.process_time()
    plan = scheduler.schedule()
    scheduler.commit(plan)
    seconds = time.process_time() - start
    for seq, _ in plan.rows:
        scheduler.append(seq, 7)
        if len(seq.token_ids) >= seq.max_num_tokens:
            scheduler.finish(seq)
    return seconds


def _run(scheduler: Scheduler, prompts: list[list[int]], num_new_tokens: int) -> list[float]:
    """Run the prompts to their end. Returns the seconds of the steps."""
    for number, prompt in enumerate(prompts):
        scheduler.add(Sequence(str(number), list(prompt), SamplingParams(), 0, PROMPT_TOKENS + num_new_tokens))
    seconds = []
    while scheduler.num_unfinished:
        seconds.append(_step(scheduler))
    return seconds


def first_run(num_shared: int) -> float:
    """The prompts are not in the cache."""
    return sum(_run(_scheduler(), _prompts(num_shared), 1))


def hits(num_shared: int) -> float:
    """The prompts are in the cache, from a run before."""
    scheduler, prompts = _scheduler(), _prompts(num_shared)
    _run(scheduler, prompts, 1)
    return sum(_run(scheduler, prompts, 1))


def waiting() -> float:
    """A prompt that is in the cache waits for blocks, while others run. The result is for the median step."""
    prompts = _prompts(0)[:9]
    scheduler = _scheduler(9 * PROMPT_TOKENS // BLOCK_SIZE)
    _run(scheduler, prompts[:1], 1)
    return statistics.median(_run(scheduler, prompts[1:] + prompts[:1], NUM_STEPS // 2)[: NUM_STEPS // 2])


def decode() -> float:
    """A step in which each of the sequences gets one token, which fills a block in one of 16 steps."""
    seconds = _run(_scheduler(), _prompts(0), NUM_STEPS + 1)[-NUM_STEPS:]
    return sum(seconds) / len(seconds)


CASES: dict[str, Callable[[], float]] = {
    f"{NUM_PROMPTS} new prompts of {PROMPT_TOKENS} tokens": lambda: first_run(0),
    f"prefix hits of {NUM_PROMPTS} different prompts": lambda: hits(0),
    f"prefix hits of {NUM_PROMPTS} prompts, {PROMPT_TOKENS - 100} tokens shared": lambda: hits(PROMPT_TOKENS - 100),
    "a step in which 8 sequences run and a prompt waits": waiting,
    f"a decode step of {NUM_PROMPTS} sequences": decode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    gc.disable()
    for name, case in CASES.items():
        print(f"{1e6 * min(case() for _ in range(args.repeats)):9.1f} us  {name}")
    gc.enable()


if __name__ == "__main__":
    main()
