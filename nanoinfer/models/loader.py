"""A checkpoint's name -> a model ready to run on its device, with its tokenizer and EOS ids.

In: an EngineConfig. Out: the model with its weights, optimised for its device (optimize.py). The tokenizer. The EOS ids.
"""

import dataclasses
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoinfer.config import DTYPES, EngineConfig
from nanoinfer.devices.process import set_cuda_device
from nanoinfer.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidValueError,
    NanoinferError,
    UnsupportedError,
    WeightsError,
    shown,
)
from nanoinfer.models import optimize
from nanoinfer.models.checkpoint import Checkpoint, check_file, locate
from nanoinfer.models.formats.awq import AWQWeights
from nanoinfer.models.formats.compressed_tensors import CompressedWeights
from nanoinfer.models.formats.fp8 import FP8Weights
from nanoinfer.models.formats.gguf import GGUFFile, read_gguf
from nanoinfer.models.formats.gguf_weights import GGUFWeights
from nanoinfer.models.formats.gptq import GPTQWeights
from nanoinfer.models.formats.lora import LoraWeights
from nanoinfer.models.formats.packed import PackedWeights
from nanoinfer.models.parallel_layers import Communicator
from nanoinfer.models.registry import Model, find_model
from nanoinfer.models.sharding import join_shards, shard_on_meta
from nanoinfer.models.weights import WeightFiles, Weights, dtype_of, head_is_tied, load_weights
from nanoinfer.tokenization.gguf_tokenizer import tokenizer_from_gguf
from nanoinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Fields of a family's config that no weight can be smaller than.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)

MAX_TOKENIZER_BYTES = 2**26  # of one file. Gemma 3's tokenizer.json has 33 MB.
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")  # how they begin


# quant_method in config.json -> how such a checkpoint is unpacked
_PACKED_FORMATS: dict[str, type[PackedWeights]] = {
    "gptq": GPTQWeights,
    "awq": AWQWeights,
    "compressed-tensors": CompressedWeights,
    "fp8": FP8Weights,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, and its files.

    Attributes:
        num_parameters: of the checkpoint. Packed and quantised weights are no parameters any more.
        has_independent_rows: whether the rows of its linear layers have the same bits in any batch, on this machine.
        tokenizer: None if there is none. The model then takes token ids only.
    """

    checkpoint: Checkpoint
    model: Model
    num_parameters: int
    has_independent_rows: bool
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]


def load(config: EngineConfig, communicator: Communicator | None = None) -> Loaded:
    """Load a model, its tokenizer and its EOS ids, and optimise the model for its device.

    communicator: connects the ranks among which the model is split. None: there is one.

    Raises:
        CheckpointNotFoundError, CheckpointError, WeightsError, UnsupportedError
    """
    checkpoint = Checkpoint.open(config.model, config.revision)
    model, num_parameters, has_independent_rows = load_optimized(checkpoint, config, communicator)
    tokenizer_path = locate(config.tokenizer, with_weights=False) if config.tokenizer is not None else checkpoint.path
    tokenizer = load_tokenizer(tokenizer_path, checkpoint.gguf if config.tokenizer is None else None)
    if config.tokenizer is not None and tokenizer is None:
        raise CheckpointNotFoundError(f"{tokenizer_path} holds no tokenizer files, such as tokenizer.json")
    eos_token_ids = checkpoint.eos_token_ids
    if not eos_token_ids and tokenizer is not None and tokenizer.hf.eos_token_id is not None:
        eos_token_ids = frozenset([tokenizer.hf.eos_token_id])
    if outside := sorted(token_id for token_id in eos_token_ids if not 0 <= token_id < model.config.vocab_size):
        # No error: transformers writes 50256 into the config of a small GPT-2.
        logger.warning("eos_token_id %s is no id of this model's vocabulary, and ends no text", shown(outside))
    eos_token_ids -= frozenset(outside)
    return Loaded(checkpoint, model, num_parameters, has_independent_rows, tokenizer, eos_token_ids)


def load_optimized(checkpoint: Checkpoint, config: EngineConfig, communicator: Communicator | None) -> tuple[Any, int, bool]:
    """Load a model, or a rank's part of it, and optimise it for its device.

    Returns:
        The Model, and num_parameters and has_independent_rows of Loaded, which are those of all ranks.
    """
    device = resolve_device(config.device)
    if config.quantization and device.type != "cpu":
        raise UnsupportedError(
            f"quantization={config.quantization!r} runs on a CPU only, got device {str(device)!r}; leave it out"
        )
    if device.type == "cuda":
        set_cuda_device(device)
    dtype = resolve_dtype("bfloat16" if config.quantization else config.dtype, checkpoint, device)
    whole, weights = on_meta(checkpoint)
    num_parameters = sum(weight.numel() for weight in whole.parameters())
    model = _fill(whole, weights, dtype, device, config.lora, communicator)
    if device.type == "cpu":
        report = optimize.optimize_for_cpu(model, quantization=config.quantization)
        is_independent = report.are_rows_independent
        if communicator is not None:
            is_independent = bool(communicator.minimum(is_independent))
        return model, num_parameters, is_independent
    if not config.enforce_eager:
        optimize.optimize_for_cuda(model)
    return model, num_parameters, False


def load_tokenizer(path: Path, file: GGUFFile | None = None) -> Tokenizer | None:
    """The tokenizer of a folder or of a GGUF file, or None where there is none. file: the GGUF file's, if it has been read."""
    if file is not None or path.is_file():
        return tokenizer_from_gguf((file or read_gguf(path)).metadata, path)
    _check_tokenizer_files(path)
    return Tokenizer.load(path)


def _check_tokenizer_files(path: Path) -> None:
    """Refuse files that transformers would hang on, or read whole for a long time. It chooses among many names."""
    for file in (*path.iterdir(), *path.glob("additional_chat_templates/*")):
        if file.suffix in (".json", ".txt", ".jinja", ".model") and file.exists() and not file.is_dir():
            check_file(file, MAX_TOKENIZER_BYTES if file.name.startswith(_TOKENIZER_FILES) else None)


def load_model(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    lora: Sequence[tuple[str, float]] = (),
) -> Any:
    """Build the checkpoint's model with its weights: the textbook form, which runs on every device.

    Args:
        checkpoint: the files.
        dtype: one of config.DTYPES. "auto" is the checkpoint's own, or fp32 on a CPU that is slow at it.
        device: where the weights go.
        lora: adapters to merge into the weights, each with its strength.

    Returns:
        A Model.

    Raises:
        UnsupportedError, CheckpointError, WeightsError
        InvalidValueError: a dtype that is not in config.DTYPES.
    """
    device = torch.device(device)
    resolved = resolve_dtype(dtype, checkpoint, device)
    return _fill(*on_meta(checkpoint), resolved, device, lora)


def _fill(
    model: Any,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    lora: Sequence[tuple[str, float]],
    communicator: Communicator | None = None,
) -> Any:
    """Give a model on the meta device its weights. With a communicator, return this rank's part of it."""
    vocab_size = model.config.vocab_size
    if lora:
        weights = LoraWeights(weights, lora, model.weight_rules)
    if communicator is not None:
        model, weights = shard_on_meta(model, weights, communicator.rank, communicator.size)
    load_weights(model, weights, model.weight_rules, dtype, device)
    if communicator is not None:
        join_shards(model, vocab_size, communicator)
    return model.to(device).eval()


def open_weights(checkpoint: Checkpoint) -> Weights:
    """Return the checkpoint's tensors as the model takes them, whatever the format that they are stored in.

    Raises:
        UnsupportedError: a quantisation that is not supported.
        WeightsError: files that are damaged, or whose tensors contradict each other.
    """
    if checkpoint.gguf is not None:
        return GGUFWeights(checkpoint.gguf)
    settings = checkpoint.config.get("quantization_config")
    if not settings:
        return WeightFiles(checkpoint.weight_files)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    packed_format = _PACKED_FORMATS.get(method) if isinstance(method, str) else None
    if packed_format is None or not isinstance(settings, dict):
        raise UnsupportedError(
            f"checkpoints quantised with {shown(method)} are not supported; {', '.join(_PACKED_FORMATS)} are. "
            "Take one of these, a GGUF file, or the unquantised checkpoint"
        )
    return packed_format(WeightFiles(checkpoint.weight_files), settings, checkpoint.config_path)


def on_meta(checkpoint: Checkpoint) -> tuple[Any, Weights]:
    """Build the checkpoint's model on the meta device: every shape, and no weights. Return it and the checkpoint's tensors.

    Raises: the errors of `load`.
    """
    model_class, config = read_config(checkpoint)
    files = open_weights(checkpoint)
    _compare_sizes(config, files, checkpoint.config_path)
    is_tied = head_is_tied(config.tie_word_embeddings, files, model_class.weight_rules)
    with torch.device("meta"):
        return model_class(dataclasses.replace(config, tie_word_embeddings=is_tied)), files


def read_config(checkpoint: Checkpoint) -> tuple[type[Any], Any]:
    """Return the family's class and its config. Check types and ranges, and that the numbers of heads are consistent.

    Raises:
        UnsupportedError, CheckpointError
    """
    path = checkpoint.config_path
    model_class = find_model(checkpoint.config)
    try:
        config = model_class.Config.from_hf(checkpoint.config)
    except KeyError as error:
        raise CheckpointError(f"{path} has no {error}, which this architecture needs") from error
    except NanoinferError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} holds a value of the wrong type ({error}); download it again") from error
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        allowed = None
        is_size = field.type is int or (field.type == int | None and value is not None)
        if is_size and (type(value) is not int or not 1 <= value < 2**31):
            allowed = "a number >= 1 and below 2**31"
        elif field.type is float and (type(value) not in (int, float) or not abs(value) <= sys.float_info.max):
            allowed = "a finite number"
        elif field.type is bool and type(value) is not bool:
            allowed = "true or false"
        if allowed is not None:
            raise CheckpointError(f"{field.name} in {path} must be {allowed}, got {shown(value)}; download it again")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"num_attention_heads in {path} must be a multiple of num_key_value_heads, got {config.num_attention_heads} "
            f"and {config.num_key_value_heads}"
        )
    return model_class, config


def _compare_sizes(config: Any, files: Weights, path: Path) -> None:
    """Refuse sizes that the headers of the weights contradict, so that neither 10**6 layers nor 10**9 angles are built.

    These bounds hold for any architecture. load_weights compares every tensor.
    """
    if config.num_hidden_layers > len(files):
        raise WeightsError(
            f"num_hidden_layers in {path} is {config.num_hidden_layers}, but the weights are {len(files)} tensors; "
            "are both of the same model?"
        )
    if (num_experts := getattr(config, "num_experts", 0) * len(getattr(config, "sparse_layers", ()))) > len(files):
        raise WeightsError(
            f"num_experts in {path} makes {num_experts} experts in all layers, but the weights are {len(files)} tensors; "
            "are both of the same model?"
        )
    for name in _SIZES:
        size = getattr(config, name, None) or 1
        if size > files.num_elements:
            raise WeightsError(
                f"{name} in {path} is {size}, but the weights have only {files.num_elements} elements; "
                "are both of the same model?"
            )


def resolve_device(name: str) -> torch.device:
    """Return the device of that name. `auto` is a GPU if there is one.

    Raises:
        InvalidValueError: a name that is not a device, or a GPU that torch does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(name)}") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(name)}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidValueError(f"device is {shown(name)}, but torch sees {torch.cuda.device_count()} GPUs; use 'cpu'")
    return device


def cpu_has_fast_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve_dtype(dtype: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype that a checkpoint is run in.

    Raises:
        InvalidValueError: a dtype that is not in config.DTYPES.
        UnsupportedError: the checkpoint's own dtype is not supported.
    """
    if dtype not in DTYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
    if DTYPES[dtype] != "auto":
        return getattr(torch, DTYPES[dtype])
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")  # newer and older transformers
    own = {"float64": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    resolved = own.get(str(name).removeprefix("torch.")) if name else dtype_of(open_weights(checkpoint))
    if resolved is None:
        raise UnsupportedError(
            f"the checkpoint's dtype is {shown(name)}; {', '.join(own)} are supported. Pass dtype= to choose one"
        )
    is_fast = device.type != "cpu" or resolved is torch.float32 or (resolved is torch.bfloat16 and cpu_has_fast_bf16())
    if not is_fast:
        logger.info("the checkpoint is %s, which this CPU is slow at: using float32 (dtype= chooses)", resolved)
        return torch.float32
    return resolved
