"""Solutions of notebook 00a."""

import torch
from definitions import definitions
from safetensors.torch import load_file

from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("00a_attention_primer")
torch.set_grad_enabled(False)
torch.set_num_threads(1)
checkpoint = Checkpoint.open("tiny-gpt2")
tokenizer = Tokenizer.load(checkpoint.path)
weights = {
    name.removeprefix("transformer."): tensor for name, tensor in load_file(checkpoint.path / "model.safetensors").items()
}
notebook.weights = weights
masked, heads = notebook.causal_weights, notebook.heads
ids = torch.tensor(tokenizer.encode("Once upon a time, there was a kind fox named Leo. He"))

# Exercise 1: without position rows, what does the mask tell a row of its place?
x = weights["wte.weight"][ids]
for name, shares in (("causal mask", masked), ("no mask", lambda scores: scores.softmax(dim=-1))):
    notebook.causal_weights = shares
    y = x + notebook.attention(notebook.layer_norm(x, "h.0.ln_1"), layer=0)
    difference = (y[2] - y[7]).abs().max().item()
    print(f"{name}: the rows of the two ' a' differ by {difference:.0e} after attention")
    assert (difference > 1e-2) == (name == "causal mask")
notebook.causal_weights = masked
# Without a mask both rows see the same set of tokens and get the same sum. With the mask each sees the tokens before it, and
# those are different ones. So a causal model can learn something about positions even without position rows.

# Exercise 2: no division by the square root of the head's size
normed = notebook.layer_norm(weights["wte.weight"][ids] + weights["wpe.weight"][: len(ids)], "h.0.ln_1")
for name, factor in (("with the division", 1.0), ("without", 32**0.5)):
    notebook.causal_weights = lambda scores, factor=factor: masked(scores * factor)  # times the root: the division undone
    largest = heads(normed, 0)[0].amax(dim=-1).mean().item()
    p = notebook.transformer(ids[:-1]).softmax(dim=-1)
    of_text = p[range(len(ids) - 1), ids[1:]].log().mean().exp().item()
    print(f"{name}: largest weight {largest:.2f} on average, probability of the text's tokens {of_text:.2f}")
    following = tokenizer.token_text(p[-1].argmax().item())
    print(f"   after 'Leo.' comes {following!r}")
    assert (following == " He") == (name == "with the division")
notebook.causal_weights = masked
# The weights concentrate on fewer tokens. The model was trained with the division, so its probabilities get worse, and it
# no longer knows whether Leo is he or she.

# Exercise 3: which head does the full stop need most?
stop = tokenizer.encode("Once upon a time, there was a kind fox named Leo.")
he = tokenizer.encode(" He")[0]
losses = {}
for layer in range(notebook.NUM_LAYERS):
    for head in range(notebook.NUM_HEADS):

        def without_one(x, at, layer=layer, head=head):
            shares, out = heads(x, at)
            if at == layer:
                out = out.clone()
                out[head] = 0
            return shares, out

        notebook.heads = without_one
        losses[layer, head] = 1 - notebook.transformer(torch.tensor(stop))[-1].softmax(dim=-1)[he].item()
worst = max(losses, key=losses.get)
print(f"without layer {worst[0]}, head {worst[1]}, p(' He') is {1 - losses[worst]:.2f}")
assert worst == (2, 0)  # the head that looks from the full stop at the name
