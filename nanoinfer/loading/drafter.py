"""Load a drafter: a smaller model, or the module of a checkpoint that predicts further tokens (`mtp.*`)."""

from typing import Any

import torch

from nanoinfer.config import EngineConfig, SpeculativeConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import Loaded, load, open_weights
from nanoinfer.loading.weights import load_weights
from nanoinfer.models.registry import Model


def load_draft(speculative: SpeculativeConfig, config: EngineConfig, target: Loaded) -> Model:
    """Load the model, or the module of the model itself, that drafts for `target`.

    Raises:
        InvalidValueError: the model has other ids. The errors of load_drafter and load are raised as well.
    """
    if (name := speculative.model) is None:
        return load_drafter(target.model, config)
    draft = load(EngineConfig(model=name, dtype=config.dtype, device=config.device, enforce_eager=config.enforce_eager))
    ours, theirs = target.model.config.vocab_size, draft.model.config.vocab_size
    way_out = "choose a draft model of the same family"
    if theirs != ours:
        raise InvalidValueError(f"the draft model {name!r} has {theirs} token ids, the model has {ours}; {way_out}")
    if target.tokenizer and draft.tokenizer and target.tokenizer.hf.get_vocab() != draft.tokenizer.hf.get_vocab():
        raise InvalidValueError(f"the draft model {name!r} has a different tokenizer; {way_out}")
    return draft.model


def load_drafter(model: Any, config: EngineConfig) -> Model:
    """Load the module that drafts for a model from the same checkpoint. It will share the model's embedding and head.

    Raises:
        UnsupportedError: a family without such a module, or a checkpoint without its weights.
        WeightsError: weights that do not fit.
    """
    way_out = "use method 'ngram', or 'draft_model' with a smaller model"
    if not hasattr(model, "drafter_class"):
        raise UnsupportedError(f"method 'mtp' needs Qwen3.5 or Qwen3-Next, got a {type(model).__name__}; {way_out}")
    weights, rules = open_weights(Checkpoint.open(config.model, config.revision)), model.drafter_class.weight_rules
    if not any(name.startswith(rules.prefix) for name in weights):
        raise UnsupportedError(
            f"method 'mtp' needs weights whose names begin with {rules.prefix!r}, and the checkpoint has none: transformers "
            f"leaves them out when it saves a model; take the published checkpoint, or {way_out}"
        )
    with torch.device("meta"):
        drafter = model.drafter_class(model.config)
    weight = next(model.parameters())
    load_weights(drafter, weights, rules, weight.dtype, weight.device)
    loaded: Model = drafter.to(weight.device).eval()
    return loaded
