"""Train the bundled models: stories in, two model folders in the hub's format out.

    python -m tools.stories.train                      # both, to ./tiny-models. A CPU is enough.
    python -m tools.stories.train --model tiny-gpt2 --out nanoinfer/loading/bundled

The same command continues an interrupted run. The models are classes of transformers and the loop is plain PyTorch, without
any code of nanoinfer that runs a model.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nanoinfer_lab import stories
from tools.stories.documents import (
    END_OF_TEXT,
    MESSAGE_END,
    SEQUENCE_LENGTH,
    Document,
    train_tokenizer,
    write_document,
)
from tools.stories.measure import measure, model_card

SEED = 1234
STEPS = 16_000
TOKENS_PER_STEP = 1024  # many small steps: with four times as many tokens per step, nearly as many steps were needed
STEPS_BETWEEN_SAVES = 100
MUON_LEARNING_RATE = 0.006
ADAMW_LEARNING_RATE = 1e-3
INIT_STD = 0.08  # about 1 / sqrt(128). With the usual 0.02, the models learned to look up names much later.


@dataclass(frozen=True)
class Course:
    """A part of the training. Looking back is hard to learn, so the texts grow longer in easy steps.

    until: the course ends at this share of the steps.
    row_length: tokens per row.
    write: makes the texts.
    recall_weight: the weight of RECALLED_WORDS in the loss. These words are rare, and most other words are drawn at random,
        which teaches nothing. A weight above 1 makes these words too likely, so it is 1 in the last course.
    """

    until: float
    row_length: int
    write: Callable[[random.Random], Document]
    recall_weight: float


COURSES = (
    Course(until=1 / 8, row_length=64, write=lambda rng: Document(stories.GRAMMAR.write(rng, "tale")), recall_weight=5),
    Course(until=5 / 8, row_length=128, write=write_document, recall_weight=5),
    Course(until=1, row_length=SEQUENCE_LENGTH, write=write_document, recall_weight=1),  # GPT-2 must see every position
)
RECALLED_WORDS = [  # words that a story repeats later, and the words of a spot, which depend on its place
    *stories.HEROES, *stories.COLORS, *stories.TOYS, *stories.FRUIT, *stories.FLOWERS, *stories.NUMBERS, *stories.SKILLS,
    *stories.STONES, *stories.ANIMALS, *(place.split()[-1] for place in stories.PLACES),
    *sorted({word for spots in stories.PLACES.values() for spot in spots for word in spot.split()} - {"a", "an", "the", "of"}),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(BUILDERS), help="default: both")
    parser.add_argument("--steps", type=int, default=STEPS, help="1 or more; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("tiny-models"), help="where the model folders go")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be >= 1, got {args.steps}")
    for name in [args.model] if args.model else BUILDERS:
        make_checkpoint(name, args.steps, args.out / name)


def make_checkpoint(name: str, steps: int, folder: Path) -> None:
    """Train one model from the seed, write its folder, measure it, and write its card, which marks the folder as finished."""
    if (folder / "README.md").exists():
        print(f"{folder} is finished; delete it to train it anew")
        return
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = train_tokenizer(SEED)
    model = BUILDERS[name](len(tokenizer), tokenizer.eos_token_id).to(device)
    folder.mkdir(parents=True, exist_ok=True)
    minutes = train(model, tokenizer, steps, folder / "training.pt")
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # save_pretrained lets only its owner read it, an installed package has others
    tokenizer.save_pretrained(folder)
    figures = measure(model.eval(), tokenizer)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"a CPU (threads: {torch.get_num_threads()})"
    command = f"python -m tools.stories.train --model {name}" + (f" --steps {steps}" if steps != STEPS else "")
    training = f"`{command}`: {steps} steps of {TOKENS_PER_STEP} tokens, {minutes:.0f} minutes on {machine}"
    (folder / "README.md").write_text(model_card(name, model, training, figures))
    (folder / "training.pt").unlink(missing_ok=True)


def build_gpt2(vocab_size: int, eos: int) -> PreTrainedModel:
    """GPT-2, smaller: learned positions, LayerNorm, the head tied to the embedding."""
    size = {"vocab_size": vocab_size, "n_positions": SEQUENCE_LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # new text at every step, so no overfitting
    ids = {"bos_token_id": eos, "eos_token_id": eos}  # the default of GPT2Config is 50256
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **no_dropout, **ids, initializer_range=INIT_STD))
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(0.25)  # weak at first, because a name must be found at any position
    return model


def build_qwen3(vocab_size: int, eos: int) -> PreTrainedModel:
    """Qwen3, smaller: rotary positions, RMSNorm, normalized q and k, two query heads per KV head, an untied LM head.

    The query heads together are 6 * 32 = 192 wide and hidden_size is 128, so that code that confuses the two fails.
    """
    size = {"vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
    rest = {"max_position_embeddings": SEQUENCE_LENGTH, "tie_word_embeddings": False, "initializer_range": INIT_STD}
    # No pad_token_id: it would be that of <|endoftext|>, and an embedding with a padding id never trains that row.
    ids = {"bos_token_id": eos, "eos_token_id": eos}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, **heads, **rest, **ids))


BUILDERS = {"tiny-gpt2": build_gpt2, "tiny-qwen3": build_qwen3}
LossOfStep = Callable[[PreTrainedModel, PreTrainedTokenizerFast, int, int], Tensor]


def generation_config(tokenizer: PreTrainedTokenizerFast) -> transformers.GenerationConfig:
    """The sampling defaults. A plain story ends with <|endoftext|>, a chat answer with <|im_end|>."""
    ends = tokenizer.convert_tokens_to_ids([END_OF_TEXT, MESSAGE_END])
    return transformers.GenerationConfig(
        do_sample=True, temperature=0.7, max_new_tokens=200, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )


def story_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, step: int, steps: int) -> Tensor:
    """Compute the loss of a step on stories, of the course that the step belongs to."""
    course = next(course for course in COURSES if step < course.until * steps)
    input_ids = make_batch(tokenizer, course, step).to(model.device)
    is_recalled = recalled_tokens(tokenizer).to(model.device)
    return next_token_loss(model, input_ids, torch.where(is_recalled, course.recall_weight, 1.0))


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, state_file: Path, loss_of: LossOfStep = story_loss
) -> float:
    """Train with a warm-up and then a cosine decay to zero.

    Muon makes every update of a block's matrix orthogonal (Jordan 2024, https://kellerjordan.github.io/posts/muon/). With it,
    tiny-gpt2 learns to look up names much sooner. AdamW trains vectors, embeddings and the head.

    The text of a step depends on the step alone. On a CPU, an interrupted run therefore ends with the weights of a run without
    interruption.

    Args:
        model: trained in place.
        tokenizer: encodes the documents.
        steps: the total number, also of a continued run.
        state_file: gets the state every STEPS_BETWEEN_SAVES steps. If it exists, the run continues from it.
        loss_of: the loss of a step, given the model, the tokenizer, the step and the number of steps.

    Returns:
        The minutes that the training took.
    """
    in_blocks = [p for name, p in model.named_parameters() if p.ndim == 2 and (".h." in name or ".layers." in name)]
    others = [p for p in model.parameters() if all(p is not other for other in in_blocks)]
    optimizers = [
        torch.optim.Muon(in_blocks, lr=MUON_LEARNING_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [transformers.get_cosine_schedule_with_warmup(optimizer, steps // 20, steps) for optimizer in optimizers]
    parts = [model, *optimizers, *schedules]
    run = {"steps": steps, "tokenizer": tokenizer.backend_tokenizer.to_str()}  # must be the same to continue
    first_step, seconds = load_state(state_file, run, parts) if state_file.exists() else (0, 0.0)
    model.train()
    started = time.perf_counter() - seconds
    for step in (progress := tqdm(range(first_step, steps), initial=first_step, total=steps, desc=state_file.parent.name)):
        loss = loss_of(model, tokenizer, step, steps)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % STEPS_BETWEEN_SAVES == 0:
            save_state(state_file, run, parts, step + 1, time.perf_counter() - started)
    return (time.perf_counter() - started) / 60


def save_state(state_file: Path, run: dict[str, Any], parts: list[Any], step: int, seconds: float) -> None:
    """Save what a run needs to continue. An interruption during the write leaves the previous state intact."""
    half_written = state_file.with_suffix(".new")
    states = [part.state_dict() for part in parts]
    torch.save({"run": run, "parts": states, "step": step, "seconds": seconds}, half_written)
    half_written.replace(state_file)


def load_state(state_file: Path, run: dict[str, Any], parts: list[Any]) -> tuple[int, float]:
    """Load the saved state into the parts. Returns its step, and the seconds that the training had taken."""
    state = torch.load(state_file, map_location="cpu")
    if state["run"] != run:
        raise SystemExit(
            f"{state_file} is of a run with --steps {state['run']['steps']}, or from before the stories were changed; "
            f"give the same --steps again, or delete it"
        )
    for part, saved in zip(parts, state["parts"], strict=True):
        part.load_state_dict(saved)
    return state["step"], state["seconds"]


def next_token_loss(model: PreTrainedModel, input_ids: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy of every token but the first, given the tokens before it. weights: [vocab_size], of each token id."""
    logits = model(input_ids).logits  # [num_rows, length, vocab_size]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten(), weights)


@lru_cache(1)
def recalled_tokens(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Whether each token id [vocab_size] is one of RECALLED_WORDS, with or without a leading space or a capital."""
    spelled = [space + word for name in RECALLED_WORDS for word in {name, name.capitalize()} for space in ("", " ")]
    ids = [ids[0] for ids in tokenizer(spelled).input_ids if len(ids) == 1]
    return torch.isin(torch.arange(len(tokenizer)), torch.tensor(ids))


def make_batch(tokenizer: PreTrainedTokenizerFast, course: Course, step: int) -> Tensor:
    """Make the token ids [num_rows, row_length] of one step: documents packed into rows, the last one of each cut.

    Each row starts with the start of a document, as a prompt does. Every second row has <|endoftext|> before it.
    """
    rng = random.Random(f"{SEED} {step}")
    rows = []
    for i in range(TOKENS_PER_STEP // course.row_length):
        row = [tokenizer.eos_token_id] * (i % 2)
        while len(row) < course.row_length:
            row += course.write(rng).encode(tokenizer)
        rows.append(row[: course.row_length])
    return torch.tensor(rows)


if __name__ == "__main__":
    main()
