"""Solutions of notebook d5c."""

from collections import Counter

from definitions import definitions

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import StepScheduled
from nanoinfer.scheduling.scheduler import Scheduler

notebook = definitions("d5c_write_your_own_scheduler")


# Exercise 1: shortest first, without starvation
class ShortestWithAging(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.num_passed = Counter()

    def order_waiting(self, waiting):
        order = sorted(waiting, key=lambda seq: seq.max_num_tokens - self.num_passed[seq])
        self.num_passed.update(order[1:])  # called when the one place is free: the first one starts
        return order


def end_of_the_long_one(scheduler_cls):
    llm = LLM(device="cpu", max_num_seqs=1, kv_cache_memory=2**24, scheduler_cls=scheduler_cls)
    long, short = (SamplingParams(seed=0, max_tokens=num, ignore_eos=True) for num in (40, 8))
    llm.engine.add_request("Once upon a time", short)  # runs while the long one arrives
    request, step = llm.engine.add_request("Lily was", long), 0
    while request.output is None:
        if step % 4 == 0 and step < 400:
            llm.engine.add_request("Tom had", short)
        llm.engine.step()
        step += 1
    llm.engine.abort(*(seq.request_id for seq in llm.engine.scheduler.waiting))
    return step


ends = {scheduler_cls: end_of_the_long_one(scheduler_cls) for scheduler_cls in (notebook.ShortestFirst, ShortestWithAging)}
for scheduler_cls, step in ends.items():
    print(f"{scheduler_cls.__name__}: the long request ends in step {step}")
# Short requests arrive twice as fast as they are answered, so the long one waits until all of them have ended. With aging it
# has been passed over often enough after some 60 of them.
assert ends[notebook.ShortestFirst] > 800
assert ends[ShortestWithAging] < 700


# Exercise 2: longest prefix first
class LongestPrefixFirst(Scheduler):
    def order_waiting(self, waiting):
        return sorted(waiting, key=lambda seq: -len(self.block_manager.match_prefix(seq.token_ids)))


beginnings = [f"{name} had a red ball and a blue boat and a green hat and a warm bed." for name in ("Tom", "Lily", "Ben")]
endings = ("One day", "Soon", "Then", "But", "At last", "Every morning")
prompts = [f"{beginning} {ending}" for ending in endings for beginning in beginnings]  # interleaved
info = LLM(device="cpu", block_size=4, kv_cache_memory=2**24).info
MEMORY = 10 * info.num_cache_bytes // info.num_blocks  # ten blocks
num_computed, tokens = {}, {}
for scheduler_cls in (Scheduler, LongestPrefixFirst):
    recorder = Recorder()
    settings = {"block_size": 4, "max_model_len": 40, "max_num_seqs": 1, "kv_cache_memory": MEMORY}
    llm = LLM(device="cpu", tracer=recorder, scheduler_cls=scheduler_cls, **settings)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    num_computed[scheduler_cls] = sum(sum(step.num_new_tokens) for step in recorder.of(StepScheduled))
    tokens[scheduler_cls] = [output.outputs[0].token_ids for output in outputs]
    print(f"{scheduler_cls.__name__}: {num_computed[scheduler_cls]} tokens computed")
# Interleaved, each beginning is evicted before it comes again. Sorted by their prefixes, requests with the same beginning
# follow each other, and all but the first find it.
assert tokens[Scheduler] == tokens[LongestPrefixFirst]
assert num_computed[LongestPrefixFirst] < 0.7 * num_computed[Scheduler]
