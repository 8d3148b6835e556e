"""Solutions of notebook 02."""

import torch
from definitions import definitions

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("02_attention_with_and_without_a_kv_cache")
torch.set_grad_enabled(False)
checkpoint = Checkpoint.open("tiny-qwen3")
model, tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint.path)
config = model.config
cache = KVCache(
    num_blocks=32,
    num_layers=config.num_hidden_layers,
    block_size=16,
    num_kv_heads=config.num_key_value_heads,
    head_dim=config.head_dim,
    dtype=torch.float32,
)
notebook.model, notebook.cache, notebook.backend = model, cache, ReferenceBackend()

# Exercise 1: the hero's name is erased from the cache. Whom does the story name?
STORY = """Once upon a time, there was a kind duck named Hugo. He loved to climb trees, and he liked soup \
best of all. One sunny day, he went to the castle. He wanted to play with his white trumpet, but \
it was gone. He sat down and cried for a while. Just then, Clara the duck came by. "Why are you so \
sad?" asked Clara. They searched for two minutes. At last, Clara found the white trumpet behind \
the throne. "Thank you, Clara," said"""
ids = tokenizer.encode(STORY)
at = ids.index(tokenizer.encode(" Hugo")[0])
notebook.logits_with_cache(ids[:-1], 0)  # everything but the last token
before = notebook.logits_with_cache(ids, len(ids) - 1).softmax(-1)
for layer in range(config.num_hidden_layers):
    for part in cache.layer(layer):
        part.view(-1, *part.shape[2:])[at] = 0  # one slot: [num_slots, num_kv_heads, head_dim]
after = notebook.logits_with_cache(ids, len(ids) - 1).softmax(-1)
for name, probabilities in (("with", before), ("without", after)):
    best = probabilities.topk(3)
    told = [f"{tokenizer.token_text(i)!r} {p:.3f}" for p, i in zip(best.values, best.indices.tolist(), strict=True)]
    print(f"{name} the name's keys and values:", ", ".join(told))
# The name is read from this slot alone: without it, another name comes, or the probability is spread over many.
assert tokenizer.token_text(before.argmax().item()) == " Hugo"
assert after[ids[at]] < before[ids[at]] / 2

# Exercise 2: the blocks in another order
ids = tokenizer.encode("Once upon a time, there was a kind fox named Leo. He loved to climb trees, and he liked")
expected = notebook.logits_without_cache(ids)


class Permuted:
    """A backend with the sequence's blocks in falling order: in both places, or in one of the two."""

    def __init__(self, *, in_slots, in_table):
        self.falling = torch.arange(31, -1, -1)
        self.in_slots, self.in_table = in_slots, in_table

    def begin_step(self, cache, metadata):
        positions = metadata.slot_mapping  # the notebook puts token i in slot i
        changed = {}
        if self.in_slots:
            changed["slot_mapping"] = self.falling[positions // 16] * 16 + positions % 16
        if self.in_table:
            changed["block_tables"] = self.falling.unsqueeze(0)
        fields = {name: getattr(metadata, name) for name in metadata.__dataclass_fields__}
        return ReferenceBackend().begin_step(cache, type(metadata)(**(fields | changed)))


for in_slots, in_table in ((True, True), (True, False), (False, True)):
    for layer in range(config.num_hidden_layers):
        for part in cache.layer(layer):
            part.zero_()
    notebook.backend = Permuted(in_slots=in_slots, in_table=in_table)
    difference = (notebook.logits_with_cache(ids, 0) - expected).abs().max().item()
    print(f"slots changed {in_slots}, table changed {in_table}: logits differ by {difference:.0e}")
    # With one of the two changed, attention reads slots that nothing was written to.
    assert (difference < 1e-3) == (in_slots and in_table)

# Exercise 3: how many tokens of Qwen3-0.6B's cache take as much memory as its weights
weights, per_token = 596_049_920 * 2, 2 * 28 * 8 * 128 * 2
print(f"{weights / per_token:,.0f} tokens; with 16 KV heads {weights / (2 * per_token):,.0f}")
assert weights // per_token == 10_394
