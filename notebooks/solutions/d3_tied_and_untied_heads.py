"""Solutions of notebook d3."""

import copy
import dataclasses

import torch
from definitions import definitions

from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer

notebook = definitions("d3_tied_and_untied_heads")
torch.set_grad_enabled(False)
checkpoint = Checkpoint.open("tiny-gpt2")
notebook.tokenizer = tokenizer = Tokenizer.load(checkpoint.path)
notebook.text_ids = tokenizer.encode(notebook.TEXT)
tied, qwen = load_model(checkpoint), load_model(Checkpoint.open("tiny-qwen3"))
untied = type(tied)(dataclasses.replace(tied.config, tie_word_embeddings=False))
untied.load_state_dict(tied.state_dict())
untied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.clone())
lily, tom = notebook.id_of("Lily"), notebook.id_of("Tom")

# Exercise 1: the rows of Lily and Tom are swapped, in an untied head and in a tied table
texts = ("Lily was a", notebook.PROMPT + " Lily.")
stories = {"original": [notebook.continue_greedily(tied, text, 16) for text in (*texts, notebook.PROMPT + " Tom.")]}
for name, model in (("untied head", untied), ("tied table", tied)):
    swapped = copy.deepcopy(model)
    swapped.lm_head.weight[[lily, tom]] = swapped.lm_head.weight[[tom, lily]]
    stories[name] = [notebook.continue_greedily(swapped, text, 16) for text in texts]
    for text, story in zip(texts, stories[name], strict=True):
        print(f"{name}: {text}|{story}")
# "Lily" at the beginning of a text is another token, without a space: no row that was swapped is read, and nothing changes.
assert stories["original"][0] == stories["untied head"][0] == stories["tied table"][0]
# Untied: " Lily" is read as before, so the pronouns are a girl's. Only where her name is predicted again, Tom's would be
# written.
assert stories["untied head"][1] == stories["original"][1]
# Tied: " Lily" is read as Tom was, so the pronouns are a boy's: the story is the one that the model tells about Tom.
assert stories["tied table"][1] == stories["original"][2]

# Exercise 2: the change of section 5, with the mean of all hidden rows of TEXT
rows = notebook.hidden_rows(tied, notebook.TEXT)
for name, direction in (
    ("the row before a name", notebook.hidden_rows(tied, notebook.PROMPT)[-1]),
    ("the mean row", rows.mean(0)),
):
    change = 5 * direction / (direction @ direction)
    added = rows @ change
    print(f"{name}: adds {added.mean():.2f} on average, from {added.min():.2f} to {added.max():.2f}")
# The mean direction adds 5 on average by construction, and yet differs from place to place: a bias would need hidden rows that
# share one component exactly. With 128 numbers one row can be made to fit the positions of this text, but not those of another
# one:
best = torch.linalg.lstsq(rows, torch.full((len(rows), 1), 5.0)).solution[:, 0]
elsewhere = notebook.hidden_rows(tied, "Tom was a brave bear. Every morning, he ate three pancakes for breakfast.") @ best
print(f"fitted: from {(rows @ best).min():.2f} to {(rows @ best).max():.2f}", end=", ")
print(f"on another text from {elsewhere.min():.2f} to {elsewhere.max():.2f}")
assert (rows @ best - 5).abs().max() < 0.1 < (elsewhere - 5).abs().max()

# Exercise 3: tiny-qwen3 without its embedding
dropped = copy.deepcopy(qwen)
dropped.embed_tokens.weight = torch.nn.Parameter(dropped.lm_head.weight.clone())
print(f"loss {notebook.loss(qwen):.2f}, with the head's rows as embedding {notebook.loss(dropped):.2f}")
# The layers were trained to read other rows. In training, a tied table is one parameter that both uses move, so layers and
# table fit each other. After training, nothing makes two tables equal, and each is right in one place only.
assert notebook.loss(dropped) > 2 * notebook.loss(qwen)
