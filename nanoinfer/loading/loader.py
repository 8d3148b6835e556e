"""Load a model by its checkpoint's name: the model with its weights on its device, the tokenizer and the EOS ids.

In: a Checkpoint and an EngineConfig. Out: the model as its file in models/ defines it, the tokenizer, the EOS ids.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointNotFoundError, InvalidTypeError, shown
from nanoinfer.loading.checkpoint import Checkpoint, load_tokenizer, locate
from nanoinfer.loading.config_json import compare_sizes, read_config, source_of
from nanoinfer.loading.devices import check_memory, resolve_device, resolve_dtype
from nanoinfer.loading.weights import Weights, fill, find_sources, head_is_tied
from nanoinfer.models.registry import Model, saved_without_head
from nanoinfer.system.process import set_cuda_device
from nanoinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Gives a model on the meta device its weights: (model, weights, dtype, device) -> the model
Place = Callable[[Any, Weights, torch.dtype, torch.device], Any]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights, and its files."""

    checkpoint: Checkpoint
    model: Model
    tokenizer: Tokenizer | None  # None: the model takes only token ids
    eos_token_ids: frozenset[int]


def read_weights(model: Any, weights: Weights, dtype: torch.dtype, device: torch.device) -> Any:
    """Read all weights at once. Raises: OutOfMemoryError, WeightsError."""
    check_memory(model, dtype, device)
    fill(model, find_sources(model, weights, dtype), device)
    return model


def load(checkpoint: Checkpoint, config: EngineConfig, place: Place = read_weights) -> Loaded:
    """Load a model, its tokenizer and its EOS ids."""
    eos_token_ids = checkpoint.eos_token_ids  # checked before the weights are read, which takes long
    tokenizer_path = None if config.tokenizer is None else locate(config.tokenizer, with_weights=False)
    model = load_model(checkpoint, config.dtype, config.device, place)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = checkpoint.load_tokenizer() if tokenizer_path is None else load_tokenizer(tokenizer_path)
    if tokenizer_path is not None and tokenizer is None:
        raise CheckpointNotFoundError(f"{tokenizer_path} holds no tokenizer files, such as tokenizer.json")
    if not eos_token_ids and tokenizer is not None and tokenizer.hf.eos_token_id is not None:
        eos_token_ids = frozenset([tokenizer.hf.eos_token_id])
    if outside := sorted(token_id for token_id in eos_token_ids if not 0 <= token_id < model.config.vocab_size):
        # No error: transformers writes 50256 into the config of a small GPT-2.
        logger.warning("eos_token_id %s is outside the vocabulary and is ignored", shown(outside))
    return Loaded(checkpoint, model, tokenizer, eos_token_ids - frozenset(outside))


def load_model(
    checkpoint: Checkpoint, dtype: str = "auto", device: torch.device | str = "cpu", place: Place = read_weights
) -> Any:
    """Build the checkpoint's model with its weights: the textbook version, which runs on every device.

    Args:
        dtype: one of config.DTYPES. "auto": the checkpoint's own dtype, or another one on a device that is slow at it.
        place: how the model gets its weights.
    """
    device = resolve_device(str(device))
    if device.type != "cpu":
        set_cuda_device(device)
    chosen = resolve_dtype(dtype, checkpoint, device)
    model, weights = on_meta(checkpoint)
    return place(model, weights, chosen, device).to(device).eval()


def on_meta(checkpoint: Checkpoint) -> tuple[Any, Weights]:
    """Build the checkpoint's model on the meta device, with shapes but no weights. Also returns the checkpoint's tensors."""
    model_class, config = read_config(checkpoint)
    files = checkpoint.open_weights()
    compare_sizes(config, files, source_of(model_class, checkpoint.config_path))
    rules = model_class.weight_rules
    is_tied = head_is_tied(config.tie_word_embeddings, files, rules)
    if not is_tied and not any(name.removeprefix(rules.prefix) == rules.head for name in files):
        is_embedding_model = (checkpoint.path / "modules.json").exists()
        is_tied = is_embedding_model or saved_without_head(checkpoint.config)
        if is_tied and not is_embedding_model:
            text = "%s was saved without its LM head: embed() works, but generated texts have no meaning"
            logger.warning(text, checkpoint.path)
    with torch.device("meta"):
        model = model_class(dataclasses.replace(config, tie_word_embeddings=is_tied))
    if not hasattr(model, "config"):
        raise InvalidTypeError(f"{model_class.__name__}.__init__ must keep the config that it is given, as self.config")
    return model, files
