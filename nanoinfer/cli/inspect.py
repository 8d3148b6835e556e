"""`nanoinfer inspect` and `nanoinfer models`: describe a checkpoint, and list those on this machine.

Both read config.json, the headers of the weights and the tokenizer's files, but no weights. If a hub's model is not in the
cache, inspect downloads only its small files. models uses no network.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from torch import nn

from nanoinfer.cli.options import print_table
from nanoinfer.config import BITS
from nanoinfer.errors import CheckpointError, InvalidValueError, NanoinferError, UnsupportedError
from nanoinfer.fast.cpu.accelerate import screened_head
from nanoinfer.fast.cpu.screen import num_copy_bytes
from nanoinfer.features.formats.gguf_families import GGUFCheckpoint
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.features.quantization.rounding import check_sizes, num_linear_bytes, num_weight_bytes
from nanoinfer.features.training.stored import store
from nanoinfer.loading import config_json, devices, loader
from nanoinfer.loading.checkpoint import DEFAULT_MODEL, Checkpoint, locate, read_json
from nanoinfer.loading.folders import BUNDLED, bundled_models
from nanoinfer.loading.weights import find_sources

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim num_experts "
    "num_experts_per_tok max_position_embeddings"
).split()
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(slots=True, kw_only=True)
class Inspection:
    """The findings about a checkpoint. None means unknown."""

    path: str  # the folder or the GGUF file
    architecture: str  # the architecture in config.json
    unsupported_reason: str | None = None  # why it cannot be loaded, with a hint. None: it can be loaded
    sizes: dict[str, int] = field(default_factory=dict)  # as the engine reads them, or as in config.json if it is not supported
    is_tied: bool | None = None  # whether the LM head shares the embedding's weight
    num_parameters: int | None = None  # None: the weights are not downloaded
    num_file_bytes: int  # the bytes of the weights on the disk
    quantization: str | None  # "gguf", or the method in config.json. None: not quantised
    dtype: str | None = None  # the dtype in which it runs on this machine
    special_ids: dict[str, object]  # bos, eos and pad: an id, a list of ids or None
    has_tokenizer: bool | None = None
    has_chat_template: bool | None = None  # None: the tokenizer cannot be loaded
    num_weight_bytes: int | None = None  # the bytes of the weights in memory, in `dtype`
    num_head_copy_bytes: int | None = None  # the bytes of the copy in 8 bits that screens the LM head. None: there is no copy
    num_peak_bytes: int | None = None  # the most bytes while these two are loaded, in pieces from the files, and afterwards
    num_quantized_bytes: dict[str, int] = field(default_factory=dict)  # of the weights, by LLM's `quantization`
    num_draft_bytes: dict[int, int] = field(default_factory=dict)  # by bits, of the copy that drafts for "quantized"
    num_cache_bytes_per_token: int | None = None
    num_users: int  # the number of sequences at a time
    num_tokens: int | None  # the tokens of each sequence
    num_bytes: int | None = None  # these bytes, and those of the KV cache for these users. A step takes some more


def examine(
    model: str | None, revision: str | None = None, *, dtype: str = "auto", num_users: int = 1, num_tokens: int | None = None
) -> Inspection:
    """Read a checkpoint's headers.

    Raises:
        CheckpointNotFoundError, CheckpointError: there is no checkpoint of this name, or its config.json is corrupted.
        InvalidValueError: num_tokens exceeds the model's positions, or the dtype is unknown.
    """
    checkpoint = _open(DEFAULT_MODEL if model is None else model, revision)
    settings = "gguf" if isinstance(checkpoint, GGUFCheckpoint) else checkpoint.config.get("quantization_config")
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    found = Inspection(
        path=str(checkpoint.path),
        architecture=_architecture(checkpoint),
        num_file_bytes=sum(path.stat().st_size for path in checkpoint.weight_files),
        quantization=str(method) if method else None,
        special_ids={name: (checkpoint.config | checkpoint.generation_config).get(name) for name in _SPECIAL_IDS},
        num_users=num_users,
        num_tokens=num_tokens,
    )
    config, run_dtype, device = None, None, devices.resolve_device("auto")
    try:
        _, config = config_json.read_config(checkpoint)
        if checkpoint.weight_files or checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype")):
            run_dtype = devices.resolve_dtype(dtype, checkpoint, device)
        if checkpoint.weight_files and run_dtype is not None:
            built, weights = loader.on_meta(checkpoint)
            config, parameters = built.config, dict(built.named_parameters())
            found.num_parameters = sum(weight.numel() for weight in parameters.values())
            store(built, find_sources(built, weights, run_dtype))
            _add_copies(found, built, device)
        tokenizer = checkpoint.load_tokenizer()
        found.has_tokenizer = tokenizer is not None
        found.has_chat_template = tokenizer is not None and bool(tokenizer.get_chat_template())
    except (UnsupportedError, CheckpointError) as error:
        found.unsupported_reason = str(error)
    found.sizes = {name: size for name in _SIZES if (size := getattr(config, name, checkpoint.config.get(name))) is not None}
    if run_dtype is not None:
        found.dtype = str(run_dtype).removeprefix("torch.")
        if found.num_parameters is not None:
            found.num_weight_bytes = found.num_parameters * run_dtype.itemsize
            found.num_peak_bytes = found.num_weight_bytes + (found.num_head_copy_bytes or 0)
    if config is not None:
        found.is_tied, limit = config.tie_word_embeddings, config.max_position_embeddings
        found.num_tokens = num_tokens = num_tokens or limit
        if num_tokens > limit:
            raise InvalidValueError(f"--tokens must be <= {limit}, the positions this model knows, got {num_tokens}")
        if run_dtype is not None:
            sizes = HybridSizes.of(config)
            found.num_cache_bytes_per_token = num_cache_bytes = sizes.bytes_per_token(run_dtype)
            if found.num_peak_bytes is not None:
                num_bytes_per_user = num_tokens * num_cache_bytes + sizes.bytes_per_state
                found.num_bytes = found.num_peak_bytes + num_users * num_bytes_per_user
    return found


def _add_copies(found: Inspection, model: nn.Module, device: torch.device) -> None:
    """Add the bytes of what a device makes of the weights, besides laying them out: rounded layers and copies."""
    if device.type == "cpu" and (head := screened_head(model)) is not None:
        found.num_head_copy_bytes = num_copy_bytes(head)
    with suppress(UnsupportedError):  # raised for a layer whose inputs have no groups
        check_sizes(model)
        found.num_quantized_bytes = {name: num_weight_bytes(model, name) for name in BITS}
        found.num_draft_bytes = {bits: num_linear_bytes(model, bits) for bits in BITS.values()}


def _open(model: str, revision: str | None) -> Checkpoint:
    """Open the checkpoint, without weight files if it is a hub's whose weights have not been downloaded."""
    path = locate(model, revision, with_weights=False)
    is_download = path.parent.name == "snapshots"  # a folder of the hub's cache
    if not is_download or any(path.glob("*.safetensors")) or any(path.glob("*.gguf")):
        return Checkpoint.open(str(path))
    generation_path = path / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    return Checkpoint(path, read_json(path / "config.json"), generation_config, [])


def _architecture(checkpoint: Checkpoint) -> str:
    return ", ".join(map(str, checkpoint.config.get("architectures") or ()))


def print_inspection(found: Inspection) -> None:
    """Print a table of what is known, followed by the reason why the checkpoint cannot be loaded."""

    def size(num_bytes: int | None) -> str | None:
        return None if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"

    def shown(value: object, unit: str = "") -> str | None:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:,}{unit}" if isinstance(value, int) else None

    rows: list[tuple[str, str | None]] = [
        ("path", found.path),
        ("architecture", found.architecture),
        ("supported", shown(found.unsupported_reason is None)),
        *((name, shown(value)) for name, value in found.sizes.items()),
        ("LM head tied", shown(found.is_tied)),
        ("parameters", shown(found.num_parameters)),
        ("weights on the disk", size(found.num_file_bytes) if found.num_file_bytes else "not downloaded"),
        ("quantisation", found.quantization or "none"),
        ("dtype here", found.dtype),
        *((name, "none" if ids is None else str(ids)) for name, ids in found.special_ids.items()),
        ("tokenizer", shown(found.has_tokenizer)),
        ("chat template", shown(found.has_chat_template)),
        ("weights in memory", size(found.num_weight_bytes)),
        ("8-bit copy of the LM head", size(found.num_head_copy_bytes)),
        ("peak while loading", size(found.num_peak_bytes)),
        *((f"weights in {name}", size(num_bytes)) for name, num_bytes in found.num_quantized_bytes.items()),
        *((f"{bits}-bit copy for drafts", size(num_bytes)) for bits, num_bytes in found.num_draft_bytes.items()),
        ("KV cache per token", shown(found.num_cache_bytes_per_token, " bytes")),
        (f"memory for {found.num_users} x {found.num_tokens} tokens", size(found.num_bytes)),
    ]
    print_table(("", ""), [(name, value) for name, value in rows if value])
    if found.unsupported_reason is not None:
        print(f"not supported: {found.unsupported_reason}")


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model on this machine."""

    name: str  # the value for --model
    architecture: str  # from config.json, "" without it
    num_parameters: int
    num_bytes: int
    unsupported_reason: str | None  # None: the model can be loaded


def installed_models() -> list[InstalledModel]:
    """Find the models on this machine, the bundled models and then those of the cache, sorted by name."""
    bundled = [
        (name, BUNDLED / name, sum(path.stat().st_size for path in (BUNDLED / name).iterdir())) for name in bundled_models()
    ]
    models = []
    for name, folder, num_bytes in (*bundled, *sorted(_cached())):
        architecture, num_parameters, reason = "", 0, None
        try:
            checkpoint = Checkpoint.open(str(folder))
            architecture = _architecture(checkpoint)
            num_parameters = sum(weight.numel() for weight in loader.on_meta(checkpoint)[0].parameters())
        except NanoinferError as error:
            reason = str(error).partition("\n")[0].partition("; ")[0].replace(f"{folder}{os.sep}", "")
        models.append(InstalledModel(name, architecture, num_parameters, num_bytes, reason))
    return models


def print_models(models: list[InstalledModel]) -> None:
    """Print a table of the models, followed by the reasons why some cannot be loaded."""
    rows = []
    for model in models:
        parameters = f"{model.num_parameters / 1e6:,.1f} M" if model.num_parameters else ""
        is_supported = "no" if model.unsupported_reason else "yes"
        rows.append((model.name, model.architecture, parameters, f"{model.num_bytes / 1e6:,.1f}", is_supported))
    print_table(("model", "architecture", "parameters", "MB", "supported"), rows)
    for model in models:
        if model.unsupported_reason:
            print(f"{model.name}: {model.unsupported_reason}")


def _cached() -> Iterator[tuple[str, Path, int]]:
    """Yield the name, folder and size of each model in the cache, for its main branch or its newest revision."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was downloaded yet
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            revision = max(repository.revisions, key=lambda found: ("main" in found.refs, found.last_modified))
            yield repository.repo_id, revision.snapshot_path, repository.size_on_disk
