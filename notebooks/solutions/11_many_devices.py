"""Solutions of notebook 11."""

import queue
import threading

import torch
from definitions import definitions
from safetensors.torch import load_file

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("11_many_devices")
torch.set_grad_enabled(False)
torch.set_num_threads(1)
checkpoint = Checkpoint.open("tiny-gpt2")
weights = {
    name.removeprefix("transformer."): tensor for name, tensor in load_file(checkpoint.path / "model.safetensors").items()
}
notebook.weights = weights
ids = torch.tensor(Tokenizer.load(checkpoint.path).encode("Once upon a time, there was a kind fox named"))
model = load_model(checkpoint)
expected = model.compute_logits(model(ids, torch.arange(len(ids)), DenseAttention()))

# Exercise 1: cut the embedding and the head by the vocabulary
SIZE = 2
tables = weights["wte.weight"].tensor_split(SIZE)
starts = [0, len(tables[0])]
group = notebook.Group(SIZE)
slices = [{name: one for name, one in notebook.slices_of(rank, SIZE).items() if name != "wte.weight"} for rank in range(SIZE)]


def forward_split(rank):
    """This rank's share of the logits."""
    table, at = tables[rank], ids - starts[rank]
    is_mine = (at >= 0) & (at < len(table))
    rows = torch.where(is_mine.unsqueeze(-1), table[at.clamp(0, len(table) - 1)], 0.0)
    x = group.all_reduce(rank, rows) + slices[rank]["wpe.weight"][: len(ids)]  # one rank has the row, the others add zeros
    return notebook.norm(slices[rank], notebook.layers(rank, group, slices[rank], x), "ln_f") @ table.T


logits = torch.cat(group.run(forward_split), dim=-1)
assert torch.allclose(logits, expected, atol=1e-3)
whole = sum(one.nbytes for one in notebook.slices_of(0, SIZE).values())
kept = sum(one.nbytes for one in slices[0].values()) + tables[0].nbytes
print(f"{kept / 1e6:.2f} MB per device instead of {whole / 1e6:.2f}, {group.num_calls} all-reduces instead of 8")
assert group.num_calls == 2 * notebook.NUM_LAYERS + 1
# A rank looks up zeros for tokens that it does not have, and one more all-reduce adds the lookups. The logits are gathered at
# the end, or each rank keeps its share and only the best candidates are exchanged.


# Exercise 2: each rank begins the sum with its own part
class Unordered(notebook.Group):
    def all_reduce(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        total = part
        for other in range(1, self.size):
            total = total + self.parts[(rank + other) % self.size]
        self.barrier.wait()
        return total


for size in (2, 4):
    group, parts = Unordered(size), [notebook.slices_of(rank, size) for rank in range(size)]
    results = group.run(lambda rank, group=group, parts=parts: notebook.forward(rank, group, parts[rank], ids))
    are_equal = all(torch.equal(results[0], one) for one in results)
    print(f"{size} ranks have the same bits: {are_equal}")
    assert are_equal == (size == 2)  # a + b is b + a, but (a + b) + c need not be a + (b + c)
# If ranks draw for themselves from different bits, they can draw different tokens. From then on their caches belong to
# different texts, and the sums mix the two. So the order must be the same on all ranks, or one rank draws and sends the token.

# Exercise 3: a pipeline of two devices
between, done, num_bytes = queue.Queue(), queue.Queue(), []
alone, everything = notebook.Group(1), notebook.slices_of(0, 1)


def first(num_sequences):
    with torch.no_grad():
        for _ in range(num_sequences):
            x = weights["wte.weight"][ids] + weights["wpe.weight"][: len(ids)]
            between.put(notebook.layers(0, alone, everything, x, numbers=(0, 1)))


def second(num_sequences):
    with torch.no_grad():
        for _ in range(num_sequences):
            rows = between.get()
            num_bytes.append(rows.nbytes)
            rows = notebook.layers(0, alone, everything, rows, numbers=(2, 3))
            done.put(notebook.norm(everything, rows, "ln_f") @ weights["wte.weight"].T)


threads = [threading.Thread(target=target, args=(4,)) for target in (first, second)]
for one in threads:
    one.start()
for one in threads:
    one.join()
assert all(torch.allclose(done.get(), expected, atol=1e-3) for _ in range(4))
print(f"{num_bytes[0] // len(ids)} bytes per token cross, once")
assert num_bytes[0] // len(ids) == notebook.HIDDEN * 4


def busy_share(num_sequences, num_steps=1000, num_stages=2):
    """Decode steps. A sequence's next step begins when its last one has left the pipeline. A stage takes one unit of time."""
    free_at, ready_at, last = [0] * num_stages, [0] * num_sequences, 0
    for step in range(num_steps):
        sequence = step % num_sequences
        now = ready_at[sequence]
        for stage in range(num_stages):
            now = max(now, free_at[stage]) + 1
            free_at[stage] = now
        ready_at[sequence] = last = now
    return num_steps / last


shares = {num: round(busy_share(num), 2) for num in (1, 2, 4)}
print("share of the time in which a device is busy, by sequences:", shares)
assert shares == {1: 0.5, 2: 1.0, 4: 1.0}
# One sequence keeps one device busy at a time. With as many sequences as devices, all are busy. The time per token of a
# sequence does not fall: it still passes through all layers, one device after the other.
