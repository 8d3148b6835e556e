"""A block manager of your own: the prefix cache forgets the block with the fewest hits, not the least recently used one."""

from collections import Counter

from nanoinfer import LLM, SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager


class LeastFrequentlyHit(BlockManager):
    """Counts how often each cached block was found. Of blocks with equal counts, the least recently used one goes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.num_hits = Counter()

    def start(self, seq, prefix):
        self.num_hits.update(block for _, block in prefix)
        super().start(seq, prefix)

    def choose_evicted(self, candidates):
        return min(candidates, key=self.num_hits.__getitem__)

    def evict(self, block):
        del self.num_hits[block]  # its next content begins at zero
        super().evict(block)


if __name__ == "__main__":
    question = "Once upon a time, there was a kind duck named Max. Every morning, he ate three pancakes for breakfast."
    others = [f"Tom had {i} cars and {i} boats, and {i} red balls. " * 4 for i in range(30, 90, 2)]
    params = SamplingParams(max_tokens=1, temperature=0)
    for block_manager_cls in (BlockManager, LeastFrequentlyHit):
        llm = LLM(block_manager_cls=block_manager_cls, block_size=16, max_num_seqs=1, max_model_len=256, kv_cache_memory=2**20)
        for prompts in ([question] * 3, others, [question]):
            found = [llm.generate(prompt, params, use_tqdm=False)[0].metrics.num_cached_tokens for prompt in prompts]
        print(f"{block_manager_cls.__name__}: {found[0]} tokens of the frequent prompt are still cached")
