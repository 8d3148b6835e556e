"""A scheduler of your own: waiting requests that may generate fewer tokens start first. The texts stay the same.

On the command line: `nanoinfer serve --scheduler-cls shortest_job_first.ShortestJobFirst`, in the folder of this file.
"""

from nanoinfer import LLM, SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler


def num_left(seq):
    """The most tokens that it may still compute."""
    return seq.max_num_tokens - seq.num_computed_tokens


class ShortestJobFirst(Scheduler):
    """The shortest waiting request starts first, and the longest running one is preempted."""

    def order_waiting(self, waiting):
        return sorted(waiting, key=num_left)

    def choose_victim(self, running, seq):
        return max(running, key=num_left)


if __name__ == "__main__":
    lengths = [90, 70, 50, 30, 10]
    params = [SamplingParams(max_tokens=length, seed=0, ignore_eos=True) for length in lengths]
    texts = []
    for scheduler_cls in (Scheduler, ShortestJobFirst):
        llm = LLM(scheduler_cls=scheduler_cls, max_num_seqs=1, kv_cache_memory=2**24)
        outputs = llm.generate(["Once upon a time"] * len(lengths), params, use_tqdm=False)
        by_end = sorted(outputs, key=lambda output: output.metrics.finished_time)
        print(f"{scheduler_cls.__name__}: finished in the order {[len(output.outputs[0].token_ids) for output in by_end]}")
        texts.append([output.outputs[0].text for output in outputs])
    print("the same texts:", texts[0] == texts[1])
