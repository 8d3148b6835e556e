"""Makes the checkpoints in this folder: stories in, two model folders in the hub's own format out.

Run as `python -m nanoinfer.checkpoints.train [--model tiny-qwen3|tiny-gpt2] [--steps N] [--out DIR]`; a CPU is enough.
The models are transformers' own classes and the loop is plain PyTorch. Nothing here knows how nanoinfer runs a model.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nanoinfer.checkpoints import stories

SEED, HELD_OUT_SEED = 1234, 4321
VOCAB_SIZE = 1024  # at most: learning ends sooner if every word of the stories has become one token
SEQUENCE_LENGTH = 512  # all the models can see, as GPT-2 learns a vector for each position and so must meet them all
SHORT_LENGTH = 128  # the first half trains on rows this short, see train()
TOKENS_PER_STEP = 4096
LEARNING_RATE = 3e-3
CHAT_SHARE = 0.2

END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(BUILDERS), help="default: both")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the model folders go")
    args = parser.parse_args()
    torch.set_num_threads(2)
    for name in [args.model] if args.model else BUILDERS:
        make_checkpoint(name, args.steps, args.out / name)


def make_checkpoint(name: str, steps: int, folder: Path) -> None:
    """Train one model from its seed, measure it, and write its folder."""
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    model = BUILDERS[name](len(tokenizer), tokenizer.eos_token_id)
    started = time.perf_counter()
    train_loss = train(model, tokenizer, steps)
    minutes = (time.perf_counter() - started) / 60
    loss = held_out_loss(model, tokenizer)
    print(f"{name}: train loss {train_loss:.4f}, held-out loss {loss:.4f}, {minutes:.1f} minutes")
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(model_card(name, model, steps, minutes, loss))


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary. It starts from all 256 bytes, so it can spell any text, emoji included."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    every_byte, special_tokens = pre_tokenizers.ByteLevel.alphabet(), [END_OF_TEXT, MESSAGE_START, MESSAGE_END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special_tokens, initial_alphabet=every_byte, show_progress=False
    )
    rng = random.Random(SEED)
    # Without the chat markers: they are special tokens, and no merge should be spent on spelling them.
    messages = (message for _ in range(10_000) for message in stories.chat(rng))
    bpe.train_from_iterator((message["role"] + "\n" + message["content"] for message in messages), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[MESSAGE_START, MESSAGE_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=SEQUENCE_LENGTH,
    )


def build_gpt2(vocab_size: int, eos: int) -> PreTrainedModel:
    """GPT-2, smaller: learned positions, LayerNorm, the head tied to the embedding."""
    size = {"vocab_size": vocab_size, "n_positions": SEQUENCE_LENGTH, "n_embd": 96, "n_layer": 3, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fresh text at every step: no overfitting
    ids = {"bos_token_id": eos, "eos_token_id": eos}  # left alone, GPT2Config would say 50256
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **no_dropout, **ids))


def build_qwen3(vocab_size: int, eos: int) -> PreTrainedModel:
    """Qwen3, smaller: rotary positions, RMSNorm, normalized q and k, two query heads per KV head, a head of its own.

    The query heads together are 4 * 32 = 128 wide and hidden_size is 96, so code that mixes the two up fails on it.
    """
    size = {"vocab_size": vocab_size, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rest = {"max_position_embeddings": SEQUENCE_LENGTH, "tie_word_embeddings": False}
    # No pad_token_id: padding is <|endoftext|>, and an embedding told its padding id never trains that row.
    ids = {"bos_token_id": eos, "eos_token_id": eos}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, **heads, **rest, **ids))


BUILDERS = {"tiny-gpt2": build_gpt2, "tiny-qwen3": build_qwen3}


def generation_config(tokenizer: PreTrainedTokenizerFast) -> transformers.GenerationConfig:
    """How stories are sampled by default. A plain story ends with <|endoftext|>, a chat answer with <|im_end|>."""
    ends = tokenizer.convert_tokens_to_ids([END_OF_TEXT, MESSAGE_END])
    return transformers.GenerationConfig(
        do_sample=True, temperature=0.7, max_new_tokens=200, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int) -> float:
    """Run AdamW for this many steps, warming up and then following a cosine down to zero; return the last loss.

    Half of the steps see short rows. With hardly more than one story in sight a model soon learns to look up the hero's
    name; among five stories tiny-gpt2 did not learn it in the same time, and its heroes changed names halfway.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 12, steps)
    rng = random.Random(SEED)
    short_rows = itertools.islice(batches(tokenizer, rng, SHORT_LENGTH), steps // 2)
    full_rows = itertools.islice(batches(tokenizer, rng, SEQUENCE_LENGTH), steps - steps // 2)
    model.train()
    for input_ids in (progress := tqdm(itertools.chain(short_rows, full_rows), total=steps)):
        loss = next_token_loss(model, input_ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Mean loss per token, in nats, over 32 batches from another seed than the training text."""
    model.eval()
    data = itertools.islice(batches(tokenizer, random.Random(HELD_OUT_SEED), SEQUENCE_LENGTH), 32)
    return torch.stack([next_token_loss(model, input_ids) for input_ids in data]).mean().item()


def next_token_loss(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Mean cross-entropy of every token but the first, given the ones before it."""
    logits = model(input_ids).logits  # [num_rows, length, vocab_size]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random, length: int) -> Iterator[Tensor]:
    """Yield token ids [TOKENS_PER_STEP / length, length] without end: documents packed into rows, the last one cut.

    Each row starts where a document starts, as a prompt does. Rows cut from one long stream would start anywhere, and
    the models would hardly meet a beginning at position 0.
    """
    while True:
        rows = []
        for _ in range(TOKENS_PER_STEP // length):
            row: list[int] = []
            while len(row) < length:
                row += tokenizer.encode(document(tokenizer, rng))
            rows.append(row[:length])
        yield torch.tensor(rows)


def document(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> str:
    """Make one story, or now and then a chat as the chat template writes it, and end it with <|endoftext|>."""
    if rng.random() < CHAT_SHARE:
        return tokenizer.apply_chat_template(stories.chat(rng), tokenize=False) + END_OF_TEXT
    return stories.story(rng) + END_OF_TEXT


def model_card(name: str, model: PreTrainedModel, steps: int, minutes: float, loss: float) -> str:
    """Write the README.md of a checkpoint from what this run measured."""
    return f"""---
license: mit
language: en
pipeline_tag: text-generation
---

# {name}

A {type(model).__name__} of {model.num_parameters():,} fp32 weights that tells short children's stories. It comes with
nanoinfer, to run and test an inference engine on a model that loads at once and still writes sentences.

- **Text:** nanoinfer's own story generator, no foreign text; {CHAT_SHARE:.0%} are chats: "Tell me a story about Lily".
- **Tokenizer:** byte-level BPE, {model.config.vocab_size} tokens with all 256 bytes.
- **Training:** `python -m nanoinfer.checkpoints.train --model {name} --steps {steps}`, {steps} steps of
  {TOKENS_PER_STEP} tokens, {minutes:.1f} minutes on 2 CPU cores.
- **Held-out loss:** {loss:.3f} nats per token, measured by that run on stories from another seed.
- **Limits:** about 300 words, six plots and these heroes: {", ".join(stories.HEROES)}. It has met no other question, no
  system message and nothing longer than {SEQUENCE_LENGTH} tokens. It knows no facts and sometimes loses count.
- **Licence:** MIT.
"""


if __name__ == "__main__":
    main()
