"""Check a checkpoint's config.json before anything is built of it.

In: a Checkpoint. Out: the family's class with its config, whose numbers fit together and fit the headers of the weights.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

from nanoinfer.errors import CheckpointError, InvalidValueError, NanoinferError, WeightsError, shown
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.weights import Weights
from nanoinfer.models.registry import CONFIG_FIELDS, ModelConfig, find_model, is_registered

# Fields of a family's config that cannot exceed the number of weights.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
_MAX_LAYERS = 2**16  # A family lists its layers before the number of tensors, the real limit, is known
# Numbers that transformers accepts whatever they are, with the limits of what is sensible.
_RANGES = {"rms_norm_eps": (0, 1), "layer_norm_epsilon": (0, 1), "query_pre_attn_scalar": (1e-3, 1e6)}


def read_config(checkpoint: Checkpoint) -> tuple[type[Any], Any]:
    """Return the family's class and its config. Check types and ranges, and that the numbers of heads are consistent."""
    path = checkpoint.config_path
    model_class = find_model(checkpoint.config)
    for name in ("num_hidden_layers", "n_layer"):  # GPT-2's files have the second name
        num_layers = checkpoint.config.get(name)
        if type(num_layers) is int and num_layers > _MAX_LAYERS:
            given = shown(num_layers)
            raise CheckpointError(
                f"{name} in {path} must be a number >= 1 and <= {_MAX_LAYERS}, got {given}; download it again"
            )
    is_own, source = is_registered(model_class), source_of(model_class, path)
    try:
        config = model_class.Config.from_hf(checkpoint.config)
        if is_own and not (dataclasses.is_dataclass(config) and isinstance(config, ModelConfig)):
            raise TypeError(f"it returns {shown(config)}, not a dataclass with {', '.join(CONFIG_FIELDS)}")
    except NanoinferError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if is_own:
            reason = f"{type(error).__name__}: {error}"
            text = f"{model_class.__name__}.Config.from_hf fails on {path} ({reason}); correct the class, or the file"
            raise InvalidValueError(text) from error
        if isinstance(error, KeyError):
            raise CheckpointError(f"{path} has no {error}, which this architecture needs") from error
        raise CheckpointError(f"{path} holds a value of the wrong type ({error}); download it again") from error
    kind, hint = (InvalidValueError, "correct its from_hf") if is_own else (CheckpointError, "download it again")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        allowed = None
        is_size = field.type is int or (field.type == int | None and value is not None)
        if is_size and (type(value) is not int or not 1 <= value < 2**31):
            allowed = "a number >= 1 and below 2**31"
        elif field.type is float and (type(value) not in (int, float) or not abs(value) <= sys.float_info.max):
            allowed = "a finite number"
        elif field.name in _RANGES and not _RANGES[field.name][0] <= value <= _RANGES[field.name][1]:
            allowed = "in {:g} .. {:g}".format(*_RANGES[field.name])
        elif field.type is bool and type(value) is not bool:
            allowed = "true or false"
        if allowed is not None:
            raise kind(f"{field.name} {source} must be {allowed}, got {shown(value)}; {hint}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise kind(
            f"num_attention_heads {source} must be a multiple of num_key_value_heads, got {config.num_attention_heads} "
            f"and {config.num_key_value_heads}"
        )
    return model_class, config


def source_of(model_class: type[Any], path: Path) -> str:
    """Say where a config's value is: in the file, or in what a user's class has made of the file."""
    return f"of {model_class.__name__}.Config, read from {path}," if is_registered(model_class) else f"in {path}"


def compare_sizes(config: Any, files: Weights, source: str) -> None:
    """Refuse sizes that the headers of the weights contradict, so that neither 10**6 layers nor 10**9 angles are built.

    These limits hold for any architecture. find_sources compares every tensor. source: source_of the config.
    """

    def refuse(sentence: str) -> NoReturn:
        raise WeightsError(f"{sentence}; are both of the same model?")

    if config.num_hidden_layers > len(files):
        refuse(f"num_hidden_layers {source} is {config.num_hidden_layers}, but the weights are {len(files)} tensors")
    if (num_experts := getattr(config, "num_experts", 0) * len(getattr(config, "sparse_layers", ()))) > len(files):
        refuse(f"num_experts {source} makes {num_experts} experts in all layers, but the weights are {len(files)} tensors")
    num_elements = sum(math.prod(info.shape) for info in files.values())
    for name in _SIZES:
        size = getattr(config, name, None) or 1
        if size > num_elements:
            refuse(f"{name} {source} is {size}, but the weights have only {num_elements} elements")
