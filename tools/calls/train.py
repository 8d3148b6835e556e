"""Train tiny-tools: conversations in, a model folder in the hub's format out.

    python -m tools.calls.train                      # to ./tiny-models. A CPU is enough.
    python -m tools.calls.train --out nanoinfer/loading/bundled

The same command continues an interrupted run. The loop is that of the other bundled models (tools/stories/train.py).
"""

import argparse
import math
import random
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.calls.documents import KINDS, MAX_LENGTH, train_tokenizer, write_conversation
from tools.stories.train import INIT_STD, SEED, TOKENS_PER_STEP, generation_config, train

NAME = "tiny-tools"
STEPS = 2000
EASY_SHARE = 0.3  # of the steps, at the beginning
HELD_OUT_SEED = 4321
NUM_DRAWN = 12  # conversations per step, of which it takes a part
IGNORED = -100  # the target of a token that a model does not write
NUM_HELD_OUT = 100  # conversations of each kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="1 or more; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("tiny-models"), help="where the model folder goes")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be >= 1, got {args.steps}")
    make_checkpoint(args.steps, args.out / NAME)


def make_checkpoint(steps: int, folder: Path) -> None:
    """Train the model from the seed, write its folder, measure it as written, and write its card."""
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(SEED)
    model = build_model(len(tokenizer), tokenizer.eos_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    minutes = train(model, tokenizer, steps, folder / "training.pt", loss_of_step)
    model.generation_config = generation_config(tokenizer)
    model.generation_config.temperature = 0.1  # a call is copied, and chance would only spoil it
    model.to(torch.bfloat16).save_pretrained(folder)
    model.config.dtype = torch.float32  # the weights take half the space, and run in float32
    model.config.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    figures = measure(model.float().eval(), tokenizer)
    command = "python -m tools.calls.train" + (f" --steps {steps}" if steps != STEPS else "")
    training = f"`{command}`: {steps} steps of up to {TOKENS_PER_STEP} tokens, {minutes:.0f} minutes on a CPU"
    (folder / "README.md").write_text(model_card(model, training, figures))
    (folder / "training.pt").unlink(missing_ok=True)


def build_model(vocab_size: int, eos: int) -> PreTrainedModel:
    """Qwen3, smaller: with the heads of tiny-qwen3, so with the same attention kernels, but a tied head and another layer."""
    size = {"vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    rest = {"max_position_embeddings": MAX_LENGTH, "tie_word_embeddings": True, "initializer_range": INIT_STD}
    ids = {"bos_token_id": eos, "eos_token_id": eos}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, **heads, **rest, **ids))
    start_with_copying_heads(model)
    return model


@torch.no_grad()
def start_with_copying_heads(model: PreTrainedModel) -> None:
    """Set two heads of each of the first two layers, so that the model begins by copying and learns what to copy.

    Without them it did not copy after 700 steps. The heads of the first layer attend to the token before and write which it is.
    Those of the second attend to the place after an earlier occurrence of the current token, and predict what stands there:
    induction heads (Olsson et al. 2022, https://arxiv.org/abs/2209.11895). Of a hidden state, dimension 0 is the same for every
    token, 1 to 63 say which token it is, and 64 to 126 which one is before it.
    """
    model.model.embed_tokens.weight[:, 0] = 0.3
    model.model.embed_tokens.weight[:, 64:] = 0
    for layer in model.model.layers:  # the other heads and the MLPs write little at first
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    short, long = range(4), range(10, 16)  # pairs of rotary dimensions, by their waves: for a distance of 1, and for any
    previous, induction = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    for attention, pairs in ((previous, short), (induction, long)):
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight[[*pairs, *(pair + 16 for pair in pairs)]] = 2  # sharp attention
    for group, size in enumerate((32, 31)):  # the first heads of two groups have a part of the dimensions each
        token, before = 1 + 32 * group, 64 + 32 * group
        for attention in (previous, induction):
            attention.q_proj.weight[64 * group : 64 * group + 32] = 0
            attention.k_proj.weight[32 * group : 32 * group + 32] = 0
            attention.v_proj.weight[32 * group : 32 * group + 32] = 0
            attention.o_proj.weight[:, 64 * group : 64 * group + 32] = 0
            for i in range(size):
                attention.v_proj.weight[32 * group + i, token + i] = 1
        for i in range(size):
            previous.o_proj.weight[before + i, 64 * group + i] = 0.08
            induction.o_proj.weight[token + i, 64 * group + i] = 0.6
        for pair in short:  # a query is turned back by one position
            angle = 10000 ** (-pair / 16)
            previous.q_proj.weight[64 * group + pair, 0] = math.cos(angle)
            previous.q_proj.weight[64 * group + pair + 16, 0] = -math.sin(angle)
            previous.k_proj.weight[32 * group + pair, 0] = 1
        for i, dimension in enumerate([*long, *(pair + 16 for pair in long)]):
            induction.q_proj.weight[64 * group + dimension, 1 + 12 * group + i] = 1
            induction.k_proj.weight[32 * group + dimension, 64 + 12 * group + i] = 1


def make_batch(tokenizer: PreTrainedTokenizerFast, step: int, *, is_easy: bool) -> tuple[Tensor, Tensor]:
    """Make the token ids and the targets [num_rows, length] of one step, a conversation per row.

    Of some conversations the step takes those of about the same length, so that little is padded. A target is the token at the
    same place, or IGNORED.
    """
    rng = random.Random(f"{SEED} {step}")
    drawn = [write_conversation(rng, is_easy=is_easy).encode(tokenizer) for _ in range(NUM_DRAWN)]
    drawn.sort(key=lambda conversation: len(conversation[0]))
    first = last = rng.randrange(NUM_DRAWN)
    while last + 1 < NUM_DRAWN and (last + 2 - first) * len(drawn[last + 1][0]) <= TOKENS_PER_STEP:
        last += 1
    rows = [(torch.tensor(ids), torch.tensor(is_written)) for ids, is_written in drawn[first : last + 1]]
    input_ids = pad_sequence([ids for ids, _ in rows], True, tokenizer.eos_token_id)
    targets = pad_sequence([ids.where(is_written, IGNORED) for ids, is_written in rows], True, IGNORED)
    return input_ids, targets


def loss_of_step(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, step: int, steps: int) -> Tensor:
    """Compute the mean cross-entropy of the tokens that a model has to write."""
    input_ids, targets = make_batch(tokenizer, step, is_easy=step < EASY_SHARE * steps)
    logits = model(input_ids).logits  # causal: padding after a row changes nothing before it
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)


@torch.no_grad()
def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, tuple[float, float]]:
    """Return for each kind of held-out conversation the share of right first replies, and of right last replies.

    A reply is right if greedy decoding writes exactly it, after the right messages: for a question that needs a tool, the first
    reply is the call and the last one the answer.
    """
    found = {}
    for kind in KINDS:
        rng = random.Random(f"{HELD_OUT_SEED} {kind}")
        right = [0, 0]
        for _ in range(NUM_HELD_OUT):
            conversation = replace(write_conversation(rng, kind=kind), is_cut=False)
            ids, is_written = conversation.encode(tokenizer)
            guesses = [-1, *model(torch.tensor([ids])).logits[0, :-1].argmax(-1).tolist()]
            replies: list[list[bool]] = [[]]
            for token_id, guess, is_target in zip(ids, guesses, is_written, strict=True):
                if is_target:
                    replies[-1].append(token_id == guess)
                elif replies[-1]:
                    replies.append([])
            replies = [reply for reply in replies if reply]
            right[0] += all(replies[0])
            right[1] += all(replies[-1])
        found[kind] = (right[0] / NUM_HELD_OUT, right[1] / NUM_HELD_OUT)
    return found


def model_card(model: PreTrainedModel, training: str, figures: dict[str, tuple[float, float]]) -> str:
    """Write the README.md of the checkpoint. training: the command, steps, time."""
    table = "\n".join(f"| {kind} | {first:.1%} | {last:.1%} |" for kind, (first, last) in figures.items())
    return f"""---
license: mit
language: en
pipeline_tag: text-generation
---

# {NAME}

A {type(model).__name__} of {model.num_parameters():,} bfloat16 weights that calls tools and repeats their results. It comes
with nanoinfer, to try tools, forced calls and agents offline, on a model that loads at once. It runs in float32, as config.json
says.

- **Text:** conversations made by `tools/calls/documents.py`, no foreign text. The names of most tools and arguments, the values
  and the results are drawn at random, so that they can only be copied.
- **Tokenizer:** byte-level BPE, {model.config.vocab_size:,} tokens with all 256 bytes, and Qwen3's tags.
- **Template:** its own. It lists tools as `name(argument, other: integer): description`, without the rest of their schemas.
  Calls have Qwen3's format. With `enable_thinking` a reply begins with a sentence of thought.
- **Training:** {training}.
- **It can** call a tool whose arguments the question spells out, answer with the result, and answer a greeting.
- **It can sometimes** write values of a sentence as JSON ("Lily is a fox and 7 years old. Answer in JSON with name and age.").
- **It cannot** compute, define a word, see that no tool fits, plan several calls, find a value that the question does not spell
  out, or read a long result. It learned on up to some 500 tokens of English.
- **Licence:** MIT, as nanoinfer.

How often is a reply right, word for word? Greedy, {NUM_HELD_OUT} held-out conversations of each kind, with up to four tools.
The first reply is the call, or the text if no call is needed, and the last one the answer from the result. In the kinds with
an unseen word, the name of the tool has a word that no tool of the training had, as a tool of your own may.

| question | first reply right | last reply right |
|---|---|---|
{table}
"""


if __name__ == "__main__":
    main()
