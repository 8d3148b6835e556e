"""Load a model by its checkpoint's name: the model with its weights on its device, the tokenizer and the EOS ids.

In: an EngineConfig. Out: the model as its file in models/ defines it, the tokenizer, the EOS ids.
"""

import dataclasses
import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from nanoinfer.config import DTYPES, EngineConfig
from nanoinfer.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidValueError,
    NanoinferError,
    OutOfMemoryError,
    UnsupportedError,
    WeightsError,
    first_line,
    shown,
)
from nanoinfer.features.training.loaded_weights import LoadedWeights, Origin, Shards
from nanoinfer.loading.checkpoint import ADAPTER_CONFIG, Checkpoint, check_file, locate
from nanoinfer.loading.weights import Identity, WeightFiles, Weights, dtype_of, fill, head_is_tied, place_weights
from nanoinfer.models.registry import Model, WeightRules, find_model
from nanoinfer.system.process import available_cpu_memory, set_cuda_device
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.features.formats.gguf import GGUFFile

logger = logging.getLogger(__name__)

# Fields of a family's config that cannot exceed the number of weights.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
_MAX_LAYERS = 2**16  # A family lists its layers before the number of tensors, the real limit, is known
# Numbers that transformers accepts whatever they are, with the limits of what is sensible.
_RANGES = {"rms_norm_eps": (0, 1), "layer_norm_epsilon": (0, 1), "query_pre_attn_scalar": (1e-3, 1e6)}

DEVICE_TYPES = ("cpu", "cuda")  # torch's names

MAX_TOKENIZER_BYTES = 2**26  # for a single file. Gemma 3's tokenizer.json has 33 MB
MAX_CALIBRATION_TOKENS = 2048
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")  # name beginnings


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights, and its files."""

    checkpoint: Checkpoint
    model: Model
    weights: LoadedWeights
    num_parameters: int  # of the checkpoint, even if the model is only a rank's part
    tokenizer: Tokenizer | None  # None: the model takes only token ids
    eos_token_ids: frozenset[int]


def load(config: EngineConfig, shards: Shards | None = None) -> Loaded:
    """Load a model, its tokenizer and its EOS ids. shards: the ranks that share the model. None: this process has all of it."""
    checkpoint = Checkpoint.open(config.model, config.revision)
    if not config.lora and not config.enable_lora and (checkpoint.path / ADAPTER_CONFIG).exists():
        text = "the LoRA adapter in %s is not used, while transformers with peft loads it; lora=%r merges it into the weights"
        logger.warning(text, checkpoint.path, str(checkpoint.path))
    # Checked before the weights are read, which takes long.
    eos_token_ids = checkpoint.eos_token_ids
    tokenizer_path = locate(config.tokenizer, with_weights=False) if config.tokenizer is not None else checkpoint.path
    model, weights, num_parameters = load_configured(checkpoint, config, shards)
    gguf = checkpoint.gguf if config.tokenizer is None else None
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(tokenizer_path, gguf)
    if config.calibration is not None:
        weights.calibration_ids = _read_calibration(config.calibration, tokenizer)
    if config.tokenizer is not None and tokenizer is None:
        raise CheckpointNotFoundError(f"{tokenizer_path} holds no tokenizer files, such as tokenizer.json")
    if not eos_token_ids and tokenizer is not None and tokenizer.hf.eos_token_id is not None:
        eos_token_ids = frozenset([tokenizer.hf.eos_token_id])
    if outside := sorted(token_id for token_id in eos_token_ids if not 0 <= token_id < model.config.vocab_size):
        # No error: transformers writes 50256 into the config of a small GPT-2.
        logger.warning("eos_token_id %s is outside the vocabulary and is ignored", shown(outside))
    eos_token_ids -= frozenset(outside)
    return Loaded(checkpoint, model, weights, num_parameters, tokenizer, eos_token_ids)


def _read_calibration(path: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return the first tokens of a text. Raises: InvalidValueError if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            if tokenizer and (ids := tokenizer.encode(file.read(32 * MAX_CALIBRATION_TOKENS))):
                return ids[:MAX_CALIBRATION_TOKENS]
        reason = "it has no tokens"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)  # without the path
    raise InvalidValueError(f"calibration must be a text file in UTF-8, got {shown(path)}: {reason}; leave it out")


def load_configured(
    checkpoint: Checkpoint, config: EngineConfig, shards: Shards | None = None
) -> tuple[Any, LoadedWeights, int]:
    """Load the model, or a rank's part of it, as the config says. Also returns the number of parameters of all ranks.

    The matrices of linear layers are StoredParameters on a CPU, unless enforce_eager is set: fast/ lays them out for kernels.
    """
    device = resolve_device(config.device)
    if config.quantization and device.type != "cpu":
        raise UnsupportedError(
            f"quantization={config.quantization!r} runs on a CPU only, got device {str(device)!r}; leave it out"
        )
    if device.type != "cpu":
        set_cuda_device(device)
    dtype = resolve_dtype("bfloat16" if config.quantization else config.dtype, checkpoint, device)
    # Before the files are opened, so that files that are replaced at this moment have another identity at the next start.
    paths = [path.resolve() for path in checkpoint.weight_files]
    states = [(state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in map(Path.stat, paths)]
    model, weights = on_meta(checkpoint)
    num_parameters, vocab_size = sum(weight.numel() for weight in model.parameters()), model.config.vocab_size
    if config.lora:
        from nanoinfer.features.adapters.lora import LoraWeights

        weights = LoraWeights(weights, config.lora, model.weight_rules)
    sizes = model.config
    if shards is not None:
        model, weights = shards.split(model, weights)
    for_kernels = device.type == "cpu" and not config.enforce_eager
    if for_kernels and not config.lora:
        from nanoinfer.loading.identity import sampled_digest

        version = repr((states, sampled_digest(checkpoint), checkpoint.config, type(model), model.weight_rules))
        part = (0, 1) if shards is None else (shards.rank, shards.size)
        weights.identity = Identity([*map(str, paths)], part, version)
    places = place_weights(model, weights, model.weight_rules, dtype)
    origin = Origin(config, type(model), model.weight_rules, sizes, shards)
    # Rounded weights cannot be replaced, and places would keep the original weights alive.
    held = LoadedWeights({} if config.quantization else places, origin)
    if device.type == "cpu":
        num_stored_bits = 8 * sum(size for _, size, *_ in states) / num_parameters
        _compare_memory(model, config, num_stored_bits, num_ranks=1 if shards is None else shards.size)
    else:
        _check_gpu_memory(model, device)
    if config.quantization and config.enforce_eager:
        from nanoinfer.loading.quantization import quantize_model

        quantize_model(model, config.quantization)
    linears = [module for module in model.modules() if for_kernels and type(module) is nn.Linear]
    fill(model, device, kept={linear.weight for linear in linears})
    if shards is not None:
        shards.join(model, vocab_size)
    model.to(device).eval()
    return model, held, num_parameters


def _check_gpu_memory(model: nn.Module, device: torch.device) -> None:
    """Refuse weights that exceed a GPU's free memory, before they are read. Raises: OutOfMemoryError."""
    needed = sum(weight.nbytes for weight in model.parameters())
    free, _ = torch.get_device_module(device).mem_get_info(device)
    if needed > free:
        raise OutOfMemoryError(
            f"the weights take {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free on {device}; use a smaller model, "
            "or tensor_parallel_size= for several GPUs"
        )


def _compare_memory(model: nn.Module, config: EngineConfig, num_stored_bits: float, num_ranks: int) -> None:
    """Refuse weights that this machine cannot hold, because the system would kill the process while they are read.

    Log what `quantization` would save for a quantised file. num_stored_bits: those of a weight in the files, on average.
    num_ranks: the processes that load at the same time.
    """
    needed, available = sum(weight.nbytes for weight in model.parameters()), available_cpu_memory() // num_ranks
    runs_in = config.quantization or str(next(model.parameters()).dtype).removeprefix("torch.")
    if config.quantization or config.bits_of_copy or num_stored_bits < 12:
        from nanoinfer.loading.quantization import num_linear_bytes, num_weight_bytes
    if config.quantization:
        needed = num_weight_bytes(model, config.quantization)
    elif num_stored_bits < 12:
        int8, int4 = (num_weight_bytes(model, name) for name in ("int8", "int4"))
        if needed - int4 >= 10**8:
            text = "%.1f bits per weight run in %s and take %.1f GB; quantization='int8' takes %.1f GB, 'int4' %.1f GB"
            logger.warning(text, num_stored_bits, runs_in, needed / 1e9, int8 / 1e9, int4 / 1e9)
    hint = "use " + ("a smaller model" if runs_in == "int4" else "quantization='int4' or a smaller model")
    text = f"the weights take {needed / 1e9:.1f} GB in {runs_in}"
    if config.bits_of_copy:
        needed += (copy := num_linear_bytes(model, config.bits_of_copy))
        text += f", and their copy in {config.bits_of_copy} bits, which drafts, {copy / 1e9:.1f} GB"
        hint = f"leave out speculative_config, or {hint}"
    if needed > available:
        raise OutOfMemoryError(f"{text}, and {available / 1e9:.1f} GB of memory are available; {hint}")


def load_tokenizer(path: Path, file: "GGUFFile | None" = None) -> Tokenizer | None:
    """Return the tokenizer of a folder or a GGUF file, or None if it has none. file: the header. None: not read yet."""
    if file is not None or path.is_file():
        from nanoinfer.features.formats.gguf import read_gguf
        from nanoinfer.features.formats.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf((file or read_gguf(path)).metadata, path)
    # Refuse files on which transformers would hang or spend a long time. It chooses among many names.
    for file_path in (*path.iterdir(), *path.glob("additional_chat_templates/*")):
        if file_path.suffix in (".json", ".txt", ".jinja", ".model") and file_path.exists() and not file_path.is_dir():
            check_file(file_path, MAX_TOKENIZER_BYTES if file_path.name.startswith(_TOKENIZER_FILES) else None)
    return Tokenizer.load(path)


def load_model(checkpoint: Checkpoint, dtype: str = "auto", device: torch.device | str = "cpu") -> Any:
    """Build the checkpoint's model with its weights: the textbook version, which runs on every device.

    Args:
        dtype: one of config.DTYPES. "auto": the checkpoint's own dtype, or another one on a device that is slow at it.
    """
    return load_configured(checkpoint, EngineConfig(dtype=dtype, device=str(device), enforce_eager=True))[0]


def open_weights(checkpoint: Checkpoint) -> Weights:
    """Return the checkpoint's tensors under the model's names, whatever the format in which they are stored."""
    if checkpoint.gguf is not None:
        from nanoinfer.features.formats.gguf_weights import GGUFWeights

        return GGUFWeights(checkpoint.gguf)
    settings = checkpoint.config.get("quantization_config")
    files: Weights = WeightFiles(checkpoint.weight_files, checkpoint.weight_map)
    if settings:
        from nanoinfer.features.formats.packed import open_packed

        files = open_packed(files, settings, checkpoint.config_path)
    return divided(files, find_model(checkpoint.config).weight_rules)


def divided(weights: Weights, rules: WeightRules) -> Weights:
    """Return the same tensors, after dividing those that hold several parameters in checkpoints of this family."""
    if rules.fused_experts is None:
        return weights
    from nanoinfer.features.formats.experts import ExpertWeights

    return ExpertWeights(weights, rules.fused_experts)


def on_meta(checkpoint: Checkpoint) -> tuple[Any, Weights]:
    """Build the checkpoint's model on the meta device, with shapes but no weights. Also returns the checkpoint's tensors."""
    model_class, config = read_config(checkpoint)
    files = open_weights(checkpoint)
    _compare_sizes(config, files, checkpoint.config_path)
    rules = model_class.weight_rules
    is_tied = head_is_tied(config.tie_word_embeddings, files, rules)
    if not any(name.removeprefix(rules.prefix) == rules.head for name in files) and (checkpoint.path / "modules.json").exists():
        is_tied = True  # an embedding model, which has no use for a head
    with torch.device("meta"):
        return model_class(dataclasses.replace(config, tie_word_embeddings=is_tied)), files


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
        elif field.name in _RANGES and not _RANGES[field.name][0] <= value <= _RANGES[field.name][1]:
            allowed = "in {:g} .. {:g}".format(*_RANGES[field.name])
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

    These limits hold for any architecture. match_tensors compares every tensor.
    """

    def refuse(sentence: str) -> NoReturn:
        raise WeightsError(f"{sentence}; are both of the same model?")

    if config.num_hidden_layers > len(files):
        refuse(f"num_hidden_layers in {path} is {config.num_hidden_layers}, but the weights are {len(files)} tensors")
    if (num_experts := getattr(config, "num_experts", 0) * len(getattr(config, "sparse_layers", ()))) > len(files):
        refuse(f"num_experts in {path} makes {num_experts} experts in all layers, but the weights are {len(files)} tensors")
    num_elements = sum(math.prod(info.shape) for info in files.values())
    for name in _SIZES:
        size = getattr(config, name, None) or 1
        if size > num_elements:
            refuse(f"{name} in {path} is {size}, but the weights have only {num_elements} elements")


def resolve_device(name: str) -> torch.device:
    """Return the device of that name, which must exist. "auto" is a GPU if there is any."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(name)}") from error
    if device.type not in DEVICE_TYPES or (device.type == "cpu" and device.index):
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(name)}")
    if device.type != "cpu" and (device.index or 0) >= (num_gpus := torch.get_device_module(device).device_count()):
        raise InvalidValueError(f"device is {shown(name)}, but torch sees {num_gpus} GPUs; use 'cpu'")
    return device


def cpu_has_fast_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def gpu_has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16, which torch emulates before sm_80 (Ampere)."""
    capability: tuple[int, int] = torch.get_device_module(device).get_device_capability(device)
    return capability >= (8, 0)


def default_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a checkpoint of a dtype runs: its own, unless the device is slow at it."""
    if device.type != "cpu":
        return torch.float16 if dtype is torch.bfloat16 and not gpu_has_bf16(device) else dtype
    return dtype if dtype is torch.bfloat16 and cpu_has_fast_bf16() else torch.float32


def resolve_dtype(dtype: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype in which a checkpoint runs, for one of config.DTYPES."""
    if dtype not in DTYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
    own = {"float64": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if DTYPES[dtype] != "auto":
        if DTYPES[dtype] == "bfloat16" and device.type != "cpu" and not gpu_has_bf16(device):
            raise UnsupportedError(
                f"dtype={dtype!r} requires a GPU of compute capability 8.0 or higher, got "
                f"{torch.get_device_module(device).get_device_name(device)}; use dtype='float16', or leave dtype out"
            )
        return own[DTYPES[dtype]]
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")  # the names of newer and older transformers
    resolved = own.get(str(name).removeprefix("torch.")) if name else dtype_of(open_weights(checkpoint))
    if resolved is None:
        raise UnsupportedError(
            f"the checkpoint's dtype is {shown(name)}; {', '.join(own)} are supported. Pass dtype= to choose one"
        )
    if (chosen := default_dtype(resolved, device)) is not resolved:
        text = "the checkpoint is %s, which this %s is slow at: using %s (dtype= chooses)"
        logger.info(text, resolved, "CPU" if device.type == "cpu" else "GPU", str(chosen).removeprefix("torch."))
    return chosen
