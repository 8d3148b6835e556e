"""Solutions of notebook 00b."""

import torch
from definitions import definitions

from nanoinfer import LLM, SamplingParams
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("00b_an_engine_in_60_lines")
torch.set_grad_enabled(False)
torch.set_num_threads(1)
checkpoint = Checkpoint.open("tiny-gpt2")
tokenizer = Tokenizer.load(checkpoint.path)
SETTINGS = (checkpoint.path / "model.safetensors", notebook.NUM_LAYERS, notebook.NUM_HEADS, {0, 2})
requests = [(tokenizer.encode(prompt), SamplingParams(temperature=0, max_tokens=num)) for prompt, num in notebook.REQUESTS]


# Exercise 1: yield each token as soon as it is known
class StreamingEngine(notebook.TinyEngine):
    def stream(self, requests):
        """Yield (step, request, token_id)."""
        waiting = [(i, notebook.Generation(list(ids), params)) for i, (ids, params) in enumerate(requests)]
        running, step = [], 0
        while waiting or running:
            while waiting and len(running) < self.max_num_seqs:
                running.append(waiting.pop(0))
            logits = self.forward([seq for _, seq in running])
            still = []
            for (i, seq), row in zip(running, logits, strict=True):
                seq.num_cached = len(seq.ids)
                seq.output.append(self.sample(row, seq.params, len(seq.ids)))
                seq.ids.append(seq.output[-1])
                yield step, i, seq.output[-1]
                if seq.output[-1] not in self.eos_ids and len(seq.output) < seq.params.max_tokens:
                    still.append((i, seq))
            running, step = still, step + 1


engine = StreamingEngine(*SETTINGS, max_num_seqs=3)
outputs, first_steps = [[] for _ in requests], {}
for step, i, token_id in engine.stream(requests):
    first_steps.setdefault(i, step)
    outputs[i].append(token_id)
assert outputs == engine.generate(requests)
print("step of the first token, by request:", first_steps)
assert first_steps[5] == max(first_steps.values())  # the last one waited longest


# Exercise 2: top-k
class TopKEngine(notebook.TinyEngine):
    def sample(self, logits, params, position):
        kth = logits.topk(params.top_k).values[-1]
        return super().sample(logits.masked_fill(logits < kth, float("-inf")), params, position)


ids = tokenizer.encode(notebook.PROMPT)
sampled = [(ids, SamplingParams(temperature=1, top_k=5, seed=seed, max_tokens=8)) for seed in range(10)]
llm = LLM("tiny-gpt2", device="cpu", kv_cache_memory=2**22)
theirs = llm.generate([{"prompt_token_ids": ids}] * 10, [params for _, params in sampled], use_tqdm=False)
assert TopKEngine(*SETTINGS, max_num_seqs=10).generate(sampled) == [list(one.outputs[0].token_ids) for one in theirs]
print("top-k: the same tokens for ten seeds")


# Exercise 3: what does a larger batch save, and what does it cost?
class CountingEngine(notebook.TinyEngine):
    def forward(self, seqs):
        self.rows.append(sum(len(seq.ids) - seq.num_cached for seq in seqs))
        return super().forward(seqs)


for max_num_seqs in (1, 2, 3, 6):
    engine = CountingEngine(*SETTINGS, max_num_seqs)
    engine.rows = []
    engine.generate(requests)
    print(f"max_num_seqs {max_num_seqs}: {len(engine.rows):3d} steps, {sum(engine.rows)} rows, largest step {max(engine.rows)}")
# The rows are the same: each token is computed once. The steps become fewer, so the weights are read less often. A step
# with more rows takes longer, most of all one with a prompt in it, and the sequences that decode wait for it.
