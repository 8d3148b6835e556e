"""How well a model learned the stories: its loss beside the least possible one, its stories by temperature, its model card.

The grammar knows the true probability of every document, so their entropy is known, and no model can lose less: what a model
loses beyond it is all its own. Stories are sampled by transformers here, so that nanoinfer has something to be compared with.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nanoinfer.bundled import stories
from nanoinfer.bundled.stories.documents import CHAT_SHARE, SEQUENCE_LENGTH, write_document

SEED = 4321  # not train.py's, so a held-out document was never seen: the likeliest story is one in 10 ** 15
NUM_DOCUMENTS = 1000
NUM_STORIES = 500
TEMPERATURES = (0.5, 0.7, 1.0, 1.2, 1.5)
BATCH_SIZE = 50
HERO_NAMES = list(stories.HEROES)

Told = tuple[str, str | None]  # a text, and the hero that it was asked to be about


@dataclass(frozen=True)
class Shares:
    """Of the stories sampled at one temperature: how many the grammar can write, how many bring their hero's name back."""

    are_stories: float
    hero_is_right: float


@dataclass(frozen=True)
class Figures:
    """What a model card reports. entropy and loss: nats per token, over the same held-out documents."""

    entropy: float
    loss: float
    by_temperature: dict[float, Shares]


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Figures:
    """Measure a trained model, in a few minutes on a CPU."""
    entropy, loss = entropy_and_loss(model, tokenizer)
    return Figures(entropy, loss, {t: shares(sample_stories(model, tokenizer, t)) for t in TEMPERATURES})


@torch.no_grad()
def entropy_and_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """The grammar's -log p and the model's, per token, of documents that it has not seen.

    Each document stands alone in its row, after an <|endoftext|>. Its own <|endoftext|> is one of the tokens that count.
    """
    rng = random.Random(SEED)
    documents = [write_document(rng) for _ in range(NUM_DOCUMENTS)]
    rows = [[tokenizer.eos_token_id, *document.encode(tokenizer)] for document in documents]
    num_tokens = sum(len(row) - 1 for row in rows)
    loss = sum(total_loss(model, rows[i : i + BATCH_SIZE]) for i in range(0, len(rows), BATCH_SIZE))
    return -sum(document.log_prob for document in documents) / num_tokens, loss / num_tokens


def total_loss(model: PreTrainedModel, rows: list[list[int]]) -> float:
    """The model's -log p of all tokens but the first of each row, summed. Rows may differ in length: they are padded."""
    ignored = -100
    targets = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, ignored).to(model.device)
    logits = model(targets.clamp(min=0)).logits  # causal: what stands after a row's end changes nothing before it
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=ignored, reduction="sum").item()


def sample_stories(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float) -> list[Told]:
    """Sample NUM_STORIES stories: one half answers "Tell me a story about NAME", the other goes on from the word "Once"."""
    torch.manual_seed(SEED)
    told: list[Told] = []
    for i in range(0, NUM_STORIES // 2, BATCH_SIZE):
        heroes = [HERO_NAMES[j % len(HERO_NAMES)] for j in range(i, i + BATCH_SIZE)]
        chats = [[{"role": "user", "content": f"Tell me a story about {hero}"}] for hero in heroes]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        told += zip(sample(model, tokenizer, prompts, temperature), heroes, strict=True)
        prompts = tokenizer(["Once"] * BATCH_SIZE).input_ids
        told += [("Once" + text, None) for text in sample(model, tokenizer, prompts, temperature)]
    return told


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], temperature: float
) -> list[str]:
    """What transformers' own generate continues prompts of one length with, until an EOS id or 200 tokens."""
    input_ids = torch.tensor(prompts, device=model.device)
    output_ids: Tensor = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True, temperature=temperature, top_k=0
    )
    return tokenizer.batch_decode(output_ids[:, input_ids.shape[1] :], skip_special_tokens=True)


def shares(told: list[Told]) -> Shares:
    """Check texts against the grammar."""
    are_stories = sum(stories.read(text, hero).is_complete for text, hero in told)
    return Shares(are_stories / len(told), sum(stories.hero_is_right(text, hero) for text, hero in told) / len(told))


def model_card(name: str, model: PreTrainedModel, training: str, figures: Figures) -> str:
    """Write the README.md of a checkpoint. training: its command, its steps, its time, its machine."""
    table = "\n".join(
        f"| {temperature} | {found.are_stories:.1%} | {found.hero_is_right:.1%} |"
        for temperature, found in figures.by_temperature.items()
    )
    return f"""---
license: mit
language: en
pipeline_tag: text-generation
---

# {name}

A {type(model).__name__} of {model.num_parameters():,} fp32 weights that tells short children's stories. It comes with
nanoinfer, to run, watch and test an inference engine on a model that loads at once and has really learned something.

- **Text:** nanoinfer's own grammar of stories (`stories.py` and `sentences.py` beside it), no foreign text. Of the documents,
  {CHAT_SHARE:.0%} are chats of one turn: "Tell me a story about Lily".
- **Tokenizer:** byte-level BPE, {model.config.vocab_size:,} tokens with all 256 bytes. A story ends with `<|endoftext|>`, an
  answer in a chat with `<|im_end|>`; both are EOS ids.
- **Training:** {training}.
- **Held-out loss:** {figures.loss:.4f} nats per token over {NUM_DOCUMENTS} unseen documents. Their entropy, which the grammar
  knows and no model can go below, is {figures.entropy:.4f}; the loss is {figures.loss / figures.entropy - 1:.1%} above it.
- **Limits:** twelve plots and {len(HERO_NAMES)} heroes ({", ".join(HERO_NAMES[:12])},
  {", ".join(HERO_NAMES[12:])}); no other question, no system
  message, no second turn, nothing longer than {SEQUENCE_LENGTH} tokens. It knows no facts.
- **Licence:** MIT, as nanoinfer.

What temperature does, over {NUM_STORIES} stories each, sampled by transformers from all tokens, half of them asked for in a
chat and half going on from the word "Once": how many could the grammar have written, every word in its place, and how many
bring their own hero's name back after the pronouns?

| temperature | stories of the grammar | hero's name right |
|---|---|---|
{table}
"""
