"""Measure how well a model learned the stories, and write its model card.

The grammar gives the true probability of every document, and so their entropy, which is the least possible loss. Transformers
samples the stories here, so that nanoinfer can be compared with the result.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nanoinfer_lab import stories
from tools.stories.documents import CHAT_SHARE, SEQUENCE_LENGTH, write_document

SEED = 4321  # not train.py's, so that held-out documents are new: the most likely story has probability 10 ** -15
NUM_DOCUMENTS = 1000
NUM_STORIES = 500
TEMPERATURES = (0.5, 0.7, 1.0, 1.2, 1.5)
BATCH_SIZE = 50
HERO_NAMES = list(stories.HEROES)

Sample = tuple[str, str | None]  # a text, and the hero that the prompt asked for


@dataclass(frozen=True)
class Shares:
    """Shares of the texts sampled at one temperature: the grammar can write it, and its hero's name returns correctly."""

    are_stories: float
    hero_is_right: float


@dataclass(frozen=True)
class Figures:
    """The figures of a model card. entropy, loss: nats per token, over the same held-out documents."""

    entropy: float
    loss: float
    by_temperature: dict[float, Shares]


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Figures:
    """Measure a trained model, in a few minutes on a CPU."""
    entropy, loss = entropy_and_loss(model, tokenizer)
    return Figures(entropy, loss, {t: shares(sample_stories(model, tokenizer, t)) for t in TEMPERATURES})


@torch.no_grad()
def entropy_and_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """Compute the grammar's and the model's mean -log p per token, over held-out documents.

    Each document has a row of its own, after an <|endoftext|>. The <|endoftext|> at its end counts as one of its tokens.
    """
    rng = random.Random(SEED)
    documents = [write_document(rng) for _ in range(NUM_DOCUMENTS)]
    rows = [[tokenizer.eos_token_id, *document.encode(tokenizer)] for document in documents]
    num_tokens = sum(len(row) - 1 for row in rows)
    loss = sum(total_loss(model, rows[i : i + BATCH_SIZE]) for i in range(0, len(rows), BATCH_SIZE))
    return -sum(document.log_prob for document in documents) / num_tokens, loss / num_tokens


def total_loss(model: PreTrainedModel, rows: list[list[int]]) -> float:
    """Sum the model's -log p over all tokens but the first of each row. Rows of different lengths are padded."""
    ignored = -100
    targets = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, ignored).to(model.device)
    logits = model(targets.clamp(min=0)).logits  # causal: padding after a row changes nothing before it
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=ignored, reduction="sum").item()


def sample_stories(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, temperature: float) -> list[Sample]:
    """Sample NUM_STORIES texts: one half answers "Tell me a story about NAME", the other half continues the word "Once"."""
    torch.manual_seed(SEED)
    samples: list[Sample] = []
    for i in range(0, NUM_STORIES // 2, BATCH_SIZE):
        heroes = [HERO_NAMES[j % len(HERO_NAMES)] for j in range(i, i + BATCH_SIZE)]
        chats = [[{"role": "user", "content": f"Tell me a story about {hero}"}] for hero in heroes]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        samples += zip(sample(model, tokenizer, prompts, temperature), heroes, strict=True)
        prompts = tokenizer(["Once"] * BATCH_SIZE).input_ids
        samples += [("Once" + text, None) for text in sample(model, tokenizer, prompts, temperature)]
    return samples


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], temperature: float
) -> list[str]:
    """Continue prompts of one length with generate of transformers, until an EOS id or 200 tokens."""
    input_ids = torch.tensor(prompts, device=model.device)
    output_ids: Tensor = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True, temperature=temperature, top_k=0
    )
    texts: list[str] = tokenizer.batch_decode(output_ids[:, input_ids.shape[1] :], skip_special_tokens=True)
    return texts


def shares(samples: list[Sample]) -> Shares:
    """Check texts against the grammar, and against the heroes that they should be about."""
    are_stories = sum(stories.read(text, hero).is_complete for text, hero in samples)
    return Shares(are_stories / len(samples), sum(hero_is_right(text, hero) for text, hero in samples) / len(samples))


def hero_is_right(text: str, hero: str | None = None) -> bool:
    """Whether the hero's name returns correctly, in a text that need not be a story otherwise.

    The last name must be the first name. The text must not leave the grammar where the hero is expected. Every name must have
    been introduced: the hero in the first sentence, the friend in the sentence with the second name. A text that ends before
    the hero's name returns is wrong.

    Args:
        text: a story, or an attempt at one.
        hero: the one that the story must be about, or None for any.
    """
    names = list(stories.NAME.finditer(text))
    if len(names) < 2 or not names[0][0] == names[-1][0] == (hero or names[0][0]):
        return False
    introduced = stories.NAME.findall(text[: text.find(".", names[1].end())])
    return {name[0] for name in names} <= set(introduced) and names[0][0] not in stories.read(text).expected


def model_card(name: str, model: PreTrainedModel, training: str, figures: Figures) -> str:
    """Write the README.md of a checkpoint. training: the command, steps, time and machine."""
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

- **Text:** nanoinfer's own grammar of stories (`nanoinfer_lab/stories`), no foreign text. Of the documents,
  {CHAT_SHARE:.0%} are chats of one turn: "Tell me a story about Lily".
- **Tokenizer:** byte-level BPE, {model.config.vocab_size:,} tokens with all 256 bytes. A story ends with `<|endoftext|>`, an
  answer in a chat with `<|im_end|>`. Both are EOS ids.
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
