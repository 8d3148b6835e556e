"""Solutions of notebook 10."""

import numpy as np
import torch
from definitions import definitions

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("10_speculative_decoding")
torch.set_grad_enabled(False)
torch.set_num_threads(1)
checkpoint = Checkpoint.open("tiny-qwen3")
model, tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint.path)
notebook.model, notebook.tokenizer, notebook.dense = model, tokenizer, DenseAttention()
ids = tokenizer.encode(notebook.OPENING)
ids += notebook.generate(ids, 110, num_drafts=0)[0]  # a story, greedily
ids += tokenizer.encode(" " + notebook.OPENING)
plain, _ = notebook.generate(ids, 40, num_drafts=0)


# Exercise 1: look up three tokens, then two, then one
def longest_look_up(ids, num_drafts):
    for size in (3, 2, 1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return ids[end : end + num_drafts]
    return []


two = notebook.look_up
for name, function in (("two", two), ("three, two, one", longest_look_up)):
    notebook.look_up = function
    tokens, steps = notebook.generate(ids, 40, num_drafts=4)
    assert tokens == plain
    wasted = sum(len(draft) - (len(new) - 1) for _, draft, new in steps)
    print(f"newest {name}: {len(steps)} passes, {wasted} draft tokens wasted")
# A longer match is right more often. A match of one token finds something nearly always, and is wrong more often.


# Exercise 2: drafts that are always right
for k in (1, 3, 7):
    notebook.look_up = lambda now, num_drafts: plain[len(now) - len(ids) :][:num_drafts]
    _, steps = notebook.generate(ids, 40, num_drafts=k)
    print(f"k = {k}: {len(steps)} passes")
    assert len(steps) == -(-40 // (k + 1))
# With a = 1, each step gives 1 + 1 + ... + 1 = k + 1 tokens.

# Exercise 3: agreement along a story
other = load_model(Checkpoint.open("tiny-gpt2"))
notebook.context = torch.tensor(ids[:100])
pairs = list(zip(notebook.probabilities(model), notebook.probabilities(other), strict=True))
same_u = np.array([notebook.overlap(p, q) for p, q in pairs])
rejection = np.array([np.minimum(p, q).sum() for p, q in pairs])
assert (same_u <= rejection + 1e-9).all()
print(f"both above 0.95 after {(same_u > 0.95).sum()} of {len(pairs)} tokens")
for i in np.argsort(same_u - rejection)[:3]:
    print(f"after {tokenizer.token_text(ids[i])!r}: the same u {same_u[i]:.2f}, rejection sampling {rejection[i]:.2f}")
# Both are near 1 where the next token is certain. Rejection sampling is better where many tokens are about equally likely: each
# small difference shifts the borders of all later intervals.
