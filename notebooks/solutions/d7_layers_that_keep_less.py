"""Solutions of notebook d7."""

import torch
from definitions import definitions

from nanoinfer.features.hybrid.attention import causal_attention

notebook = definitions("d7_layers_that_keep_less")
notebook.model = notebook.with_window(32, enforce_eager=True).engine.executor.runner.model
llm = notebook.with_window(None)
notebook.tokenizer = llm.get_tokenizer()
torch.manual_seed(0)

# Exercise 1: attention sinks


def mask_with_sinks(num_tokens, window, num_sinks=2):
    query, key = torch.arange(num_tokens).unsqueeze(1), torch.arange(num_tokens)
    return notebook.mask(num_tokens, window) | ((key < num_sinks) & (key <= query))


print(f"the last of 14 tokens attends to {int(mask_with_sinks(14, 6)[-1].sum())} tokens")
seen = mask_with_sinks(60, 6)[-1].nonzero().flatten().tolist()
print(f"after 60 tokens it needs the blocks {sorted({i // 8 for i in seen})}")
# A layer keeps the window and the sinks, whatever lies between them: the first block of the text is never freed.
assert len(seen) == 6 + 2

# Exercise 2: a cache that can be cut a little


class CutCache:
    """As OneSequence, with twice the window."""

    def __init__(self):
        self.kept, self.windows, self.num_tokens = {}, {}, 0

    def __call__(self, layer, q, k, v, window=None):
        before = self.kept.get(layer, (k[:0], v[:0]))
        if layer == 0:
            self.num_tokens += len(q)
        k, v = (torch.cat(pair) for pair in zip(before, (k, v), strict=True))
        out = causal_attention(q, k, v, window)
        self.windows[layer] = window
        self.kept[layer] = (k, v) if window is None else (k[-2 * window :], v[-2 * window :])
        return out

    def cut(self, num_tokens):
        """Cut all layers after num_tokens, or return False: the next query would read a key that is gone."""
        for layer, window in self.windows.items():
            first_kept = self.num_tokens - len(self.kept[layer][0])
            if window is not None and first_kept > max(num_tokens - window + 1, 0):
                return False
        num_dropped, self.num_tokens = self.num_tokens - num_tokens, num_tokens
        self.kept = {layer: (k[: len(k) - num_dropped], v[: len(v) - num_dropped]) for layer, (k, v) in self.kept.items()}
        return True


text = llm.generate("Once upon a time", notebook.GREEDY, use_tqdm=False)[0].outputs[0].text
story = notebook.tokenizer.encode("Once upon a time" + text.partition("Once")[0])
with torch.inference_mode():
    places = []
    for length in range(1, len(story) + 1):
        cache = CutCache()
        notebook.continued(cache, story, 0, num_tokens=1)
        if cache.cut(length - 1):
            places.append(length - 1)
            if length % 10 == 0:
                prompt = story[:length]
                right = notebook.continued(notebook.OneSequence(), prompt, 0)
                assert notebook.continued(cache, prompt, length - 1) == right
print(f"of {len(story)} tokens, one can go back to {places[0]} and later places")
# Twice the window lets one go back by a window and one token more, and no further.
assert len(story) - places[0] == 32 + 1

# Exercise 3: several chunks


def one_chunk_after(memory, q, k, v, log_decay, beta):
    """The outputs of a chunk and the memory after it. The memory adds a term to corrections, outputs and the new memory."""
    total = log_decay.cumsum(0)
    fading = (total.unsqueeze(1) - total).exp().tril()
    faded = total.exp().unsqueeze(1)
    system = torch.eye(len(q)) + (beta.unsqueeze(1) * (k @ k.T) * fading).tril(-1)
    corrections = torch.linalg.solve_triangular(system, beta.unsqueeze(1) * (v - faded * (k @ memory)), upper=False)
    out = faded * (q @ memory) + ((q @ k.T) * fading) @ corrections
    left = (total[-1] - total).exp().unsqueeze(1)
    return out, total[-1].exp() * memory + (left * k).T @ corrections


def in_chunks(q, k, v, log_decay, beta, size):
    memory, outs = torch.zeros(k.shape[1], v.shape[1]), []
    for start in range(0, len(q), size):
        out, memory = one_chunk_after(memory, *(x[start : start + size] for x in (q, k, v, log_decay, beta)))
        outs.append(out)
    return torch.cat(outs), memory


head = notebook.random_head(250)
expected, expected_memory = notebook.recurrence(*head)
for size in (1, 16, 100):
    out, memory = in_chunks(*head, size)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(memory, expected_memory, atol=1e-4, rtol=0)
print("chunks of 1, 16 and 100 tokens: the numbers of the recurrence, up to rounding")

# Exercise 4: how many sequences fit
SLOT, TOKEN, BLOCK, MEMORY = 16_896, 256, 8, 2**20
num_blocks = -(-500 // BLOCK)
of_blocks = num_blocks * BLOCK * TOKEN
with_one = of_blocks + SLOT
with_all = of_blocks + SLOT * (1 + 500 // BLOCK)
print(f"with one slot each: {MEMORY // with_one}. With a checkpoint after every block: {MEMORY // with_all}")
assert (MEMORY // with_one, MEMORY // with_all) == (7, 0)
