"""Solutions of notebook 09."""

import re

import torch
from definitions import definitions

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("09_structured_output")
torch.set_grad_enabled(False)
torch.set_num_threads(1)
checkpoint = Checkpoint.open("tiny-qwen3")
model, tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint.path)
texts = [tokenizer.token_text(i) for i in range(model.config.vocab_size)]
notebook.model, notebook.tokenizer, notebook.dense, notebook.texts = model, tokenizer, DenseAttention(), texts


# Exercise 1: no leading zero, at most two digits
def next_state(state, character):
    if state == "#":
        return "second digit or end" if character in "123456789" else None
    if state == "second digit or end":
        return "end" if character in "0123456789" else None
    if state == "end":
        return None
    return old_next_state(state, character)


old_next_state, notebook.next_state = notebook.next_state, next_state
pattern = re.compile(r" (fox|duck) aged [1-9][0-9]?")
numbers = ["", *map(str, range(1000)), *(f"0{i}" for i in range(100))]
for number in numbers:
    text = f" fox aged {number}"
    assert (notebook.run(text) in ("second digit or end", "end")) == bool(pattern.fullmatch(text)), text
print(f"the automaton and re agree on {len(numbers)} texts")
# There are two accepting states now. In one of them a digit may follow, and in the other only EOS.

# Exercise 2: skip what begins with a forbidden prefix
CHOICES = notebook.CHOICES
num_plain = sum(bool(piece) for piece in texts)  # each token's text is compared with the choices


def is_beginning(text):
    return any(one.startswith(text) for one in CHOICES)


allowed, num_compared, dead = set(), 0, None
for piece in sorted({piece for piece in texts if piece}):
    if dead is not None and piece.startswith(dead):
        continue  # it begins with a forbidden text, so it is forbidden
    num_compared += 1
    if is_beginning(piece):
        allowed.add(piece)
    else:  # the shortest prefix that is forbidden
        dead = next(piece[:n] for n in range(1, len(piece) + 1) if not is_beginning(piece[:n]))
expected = {texts[i] for i in notebook.allowed_by_choices("").nonzero().flatten().tolist()}
assert allowed == expected
print(f"{num_compared} comparisons instead of {num_plain}")
assert num_compared < num_plain / 5

# Exercise 3: look ahead to whole answers
raw = {choice: notebook.probability(choice, is_masked=False) for choice in notebook.TWO}
shares = {choice: one / sum(raw.values()) for choice, one in raw.items()}
print("with look-ahead:", {choice: f"{share:.1e}" for choice, share in shares.items()})
assert shares[notebook.TWO[0]] < 1e-6
# The first token decides between the two, so its probability becomes the share of the whole answer. A JSON schema with a string
# in it has more valid answers than can be listed, so their sum cannot be computed.
