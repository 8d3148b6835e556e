"""The model families, one file each, and the table that finds them by the name in config.json.

A model is `forward(input_ids, positions, attend) -> hidden [num_tokens, hidden]` and `compute_logits(hidden) -> [.., vocab]`,
with a `config` that has the fields of ModelConfig. `register_model` adds one of your own.
"""

import dataclasses
import logging
from importlib import import_module
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.checkpoint import Checkpoint
from nanoinfer.config import DTYPES
from nanoinfer.errors import CheckpointError, InvalidValueError, NanoinferError, UnsupportedError
from nanoinfer.models.weights import WeightFiles, WeightRules, dtype_of, head_is_tied, load_weights

logger = logging.getLogger(__name__)

# architecture in config.json -> "module:class", imported when it is asked for
_MODELS: dict[str, str] = {
    "GPT2LMHeadModel": "nanoinfer.models.gpt2:GPT2LMHeadModel",
    "Qwen2ForCausalLM": "nanoinfer.models.qwen:QwenForCausalLM",
    "Qwen3ForCausalLM": "nanoinfer.models.qwen:QwenForCausalLM",
}
_registered: dict[str, type[nn.Module]] = {}


@runtime_checkable
class ModelConfig(Protocol):
    """What is read of any family's config; the families' dataclasses have more."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


@runtime_checkable
class Model(Protocol):
    """What the engine calls of any family. Config: a frozen dataclass with `from_hf(dict)` and `tie_word_embeddings`."""

    Config: ClassVar[Any]
    weight_rules: ClassVar[WeightRules]
    config: Any

    def __call__(
        self, input_ids: Int[Tensor, "num_tokens"], positions: Int[Tensor, "num_tokens"], attend: Attend
    ) -> Float[Tensor, "num_tokens hidden"]: ...

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]: ...


def register_model(architecture: str, model_class: type[nn.Module]) -> None:
    """Use model_class for checkpoints whose config.json names this architecture. Yours goes before ours."""
    _registered[architecture] = model_class


def find_model(config: dict[str, Any]) -> type[Any]:
    """The class for a config.json.

    Raises: UnsupportedError for an architecture that is not covered or a quantised checkpoint; CheckpointError for none.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f'config.json names no architecture; add "architectures": [one of {", ".join(_MODELS)}]')
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(f"quantised checkpoints ({method}) are not covered; take the unquantised one")
    for architecture in architectures:
        if architecture in _registered:
            return _registered[architecture]
        if architecture in _MODELS:
            module, _, class_name = _MODELS[architecture].partition(":")
            return getattr(import_module(module), class_name)
    raise UnsupportedError(
        f"architecture {', '.join(map(str, architectures))} is not covered; {', '.join([*_MODELS, *_registered])} are. "
        "register_model adds one of your own"
    )


def load(checkpoint: Checkpoint, dtype: str = "auto", device: torch.device | str = "cpu") -> Any:
    """Build the checkpoint's model with its weights, ready to run.

    dtype: one of config.DTYPES; "auto" is the checkpoint's own (fp32 on a CPU that is slow at it). Returns a Model.
    Raises: UnsupportedError, CheckpointError, WeightsError, InvalidValueError for another dtype.
    """
    device = torch.device(device)
    resolved = resolve_dtype(dtype, checkpoint, device)
    model = on_meta(checkpoint)
    load_weights(model, WeightFiles(checkpoint.weight_files), model.weight_rules, resolved, device)
    return model.to(device).eval()


def fuse(model: nn.Module) -> None:
    """Replace what fused.py has a Triton kernel for; without Triton the model stays as it is, and one log line says so."""
    try:
        fused = import_module("nanoinfer.fused")
    except ImportError:
        logger.info("triton is not installed: norms, rotations and gates run as torch's own operators, one after the other")
        return
    fused.fuse(model)


def on_meta(checkpoint: Checkpoint) -> Any:
    """The checkpoint's model on the meta device: every shape, and no weights yet. Raises: as load does."""
    model_class = find_model(checkpoint.config)
    config = _read_config(model_class.Config, checkpoint)
    files = WeightFiles(checkpoint.weight_files)
    is_tied = head_is_tied(config.tie_word_embeddings, files, model_class.weight_rules)
    with torch.device("meta"):
        return model_class(dataclasses.replace(config, tie_word_embeddings=is_tied))


def _read_config(config_class: Any, checkpoint: Checkpoint) -> Any:
    """The family's config, with every size a positive number and the heads fitting each other."""
    path = checkpoint.path / "config.json"
    try:
        config = config_class.from_hf(checkpoint.config)
    except KeyError as error:
        raise CheckpointError(f"{path} has no {error}, which this architecture needs") from error
    except NanoinferError:
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} holds a value of the wrong type ({error}); download it again") from error
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int and (type(value) is not int or value < 1):
            raise CheckpointError(f"{field.name} in {path} must be a number >= 1, got {value!r}; download it again")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"num_attention_heads in {path} must be a multiple of num_key_value_heads, got {config.num_attention_heads} "
            f"and {config.num_key_value_heads}"
        )
    return config


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises: InvalidValueError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs; use 'cpu'")
    return device


def cpu_has_fast_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve_dtype(dtype: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """What a checkpoint is run in. dtype: one of config.DTYPES. Raises: InvalidValueError, UnsupportedError."""
    if dtype not in DTYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if DTYPES[dtype] != "auto":
        return getattr(torch, DTYPES[dtype])
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")  # newer and older transformers
    own = {"float64": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    resolved = own.get(str(name).removeprefix("torch.")) if name else dtype_of(WeightFiles(checkpoint.weight_files))
    if resolved is None:
        raise UnsupportedError(f"the checkpoint's dtype is {name!r}; {', '.join(own)} are covered. Pass dtype= to choose one")
    is_fast = device.type != "cpu" or resolved is torch.float32 or (resolved is torch.bfloat16 and cpu_has_fast_bf16())
    if not is_fast:
        logger.info("the checkpoint is %s, which this CPU is slow at: using float32 (dtype= chooses)", resolved)
        return torch.float32
    return resolved
