"""`nanoinfer inspect`: what a checkpoint is, whether it can be loaded, and what memory it takes. No weight is read.

It reads config.json, the headers of the weights and the tokenizer's files. Of a hub's model that is not in the cache it
downloads the small files only.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from nanoinfer.attention.kv_cache import bytes_per_block_of
from nanoinfer.cli.options import new_table
from nanoinfer.errors import CheckpointError, InvalidValueError, UnsupportedError
from nanoinfer.models import loader
from nanoinfer.models.checkpoint import DEFAULT_MODEL, Checkpoint, locate, read_json
from nanoinfer.models.weights import match_tensors

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint is. None means unknown.

    Attributes:
        path: of the folder or the GGUF file.
        architecture: of config.json.
        unsupported_reason: why it cannot be loaded, with the way out. None if it can be.
        sizes: as the engine reads them, or config.json's where the architecture is not supported.
        is_tied: whether the LM head shares the embedding's weight.
        num_parameters: None until the weights are downloaded.
        num_file_bytes: of the weights on the disk.
        quantization: "gguf", or the method of config.json. None is not quantised.
        dtype: in which it runs here.
        special_ids: bos, eos and pad: an id, a list of ids or None.
        has_tokenizer, has_chat_template: None if the tokenizer cannot be loaded.
        num_weight_bytes: of the weights in memory, in `dtype`.
        num_cache_bytes_per_token: of the KV cache.
        num_users, num_tokens: sequences at a time, and tokens of each.
        num_bytes: weights, and the KV cache for these users. A step takes some more.
    """

    path: str
    architecture: str
    unsupported_reason: str | None
    sizes: dict[str, int]
    is_tied: bool | None
    num_parameters: int | None
    num_file_bytes: int
    quantization: str | None
    dtype: str | None
    special_ids: dict[str, Any]
    has_tokenizer: bool | None
    has_chat_template: bool | None
    num_weight_bytes: int | None
    num_cache_bytes_per_token: int | None
    num_users: int
    num_tokens: int | None
    num_bytes: int | None


def examine(
    model: str | None, revision: str | None = None, *, dtype: str = "auto", num_users: int = 1, num_tokens: int | None = None
) -> Inspection:
    """Read a checkpoint's headers.

    Raises:
        CheckpointNotFoundError, CheckpointError: there is no checkpoint of this name, or its config.json is damaged.
        InvalidValueError: more tokens than the model knows, or an unknown dtype.
    """
    checkpoint = _open(DEFAULT_MODEL if model is None else model, revision)
    config, num_parameters, run_dtype, reason = None, None, None, None
    has_tokenizer, has_chat_template = None, None
    try:
        _, config = loader.read_config(checkpoint)
        if checkpoint.weight_files or checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype")):
            run_dtype = loader.resolve_dtype(dtype, checkpoint, loader.resolve_device("auto"))
        if checkpoint.weight_files:
            built, weights = loader.on_meta(checkpoint)
            config, parameters = built.config, dict(built.named_parameters())
            num_parameters = sum(weight.numel() for weight in parameters.values())
            match_tensors(parameters, weights, built.weight_rules)
        tokenizer = loader.load_tokenizer(checkpoint.path, checkpoint.gguf)
        has_tokenizer, has_chat_template = tokenizer is not None, tokenizer is not None and bool(tokenizer.get_chat_template())
    except (UnsupportedError, CheckpointError) as error:
        reason = str(error)
    if config is not None:
        num_tokens = num_tokens or config.max_position_embeddings
        if num_tokens > config.max_position_embeddings:
            raise InvalidValueError(
                f"--tokens must be <= {config.max_position_embeddings}, the positions this model knows, got {num_tokens}"
            )
    num_weight_bytes = num_parameters * run_dtype.itemsize if num_parameters and run_dtype else None
    num_cache_bytes = bytes_per_block_of(config, 1, run_dtype) if config and run_dtype else None
    num_bytes = None
    if num_weight_bytes and num_cache_bytes and num_tokens:
        num_bytes = num_weight_bytes + num_users * num_tokens * num_cache_bytes
    return Inspection(
        path=str(checkpoint.path),
        architecture=", ".join(map(str, checkpoint.config.get("architectures") or ())),
        unsupported_reason=reason,
        sizes={name: size for name in _SIZES if (size := getattr(config, name, checkpoint.config.get(name))) is not None},
        is_tied=None if config is None else config.tie_word_embeddings,
        num_parameters=num_parameters,
        num_file_bytes=sum(path.stat().st_size for path in checkpoint.weight_files),
        quantization=_quantization(checkpoint),
        dtype=None if run_dtype is None else str(run_dtype).removeprefix("torch."),
        special_ids={name: (checkpoint.config | checkpoint.generation_config).get(name) for name in _SPECIAL_IDS},
        has_tokenizer=has_tokenizer,
        has_chat_template=has_chat_template,
        num_weight_bytes=num_weight_bytes,
        num_cache_bytes_per_token=num_cache_bytes,
        num_users=num_users,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
    )


def _open(model: str, revision: str | None) -> Checkpoint:
    """The checkpoint, without weight files if it is a hub's and they have not been downloaded."""
    path = locate(model, revision, with_weights=False)
    is_download = path.parent.name == "snapshots"  # a folder of the hub's cache
    if not is_download or any(path.glob("*.safetensors")) or any(path.glob("*.gguf")):
        return Checkpoint.open(str(path))
    generation_path = path / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    return Checkpoint(path, read_json(path / "config.json"), generation_config, [])


def _quantization(checkpoint: Checkpoint) -> str | None:
    if checkpoint.gguf is not None:
        return "gguf"
    settings = checkpoint.config.get("quantization_config")
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
    return str(method) if method else None


def print_inspection(found: Inspection) -> None:
    """Print what is known as a table, and below it why the checkpoint cannot be loaded."""

    def size(num_bytes: int | None) -> str | None:
        return None if num_bytes is None else f"{num_bytes / 1e6:,.1f} MB"

    def number(value: Any, unit: str = "") -> str | None:
        return f"{value:,}{unit}" if isinstance(value, int) else None

    def answer(flag: bool | None) -> str | None:
        return None if flag is None else "yes" if flag else "no"

    rows: list[tuple[str, str | None]] = [
        ("path", found.path),
        ("architecture", found.architecture),
        ("supported", answer(found.unsupported_reason is None)),
        *((name, number(value)) for name, value in found.sizes.items()),
        ("LM head tied", answer(found.is_tied)),
        ("parameters", number(found.num_parameters)),
        ("weights on the disk", size(found.num_file_bytes) if found.num_file_bytes else "not downloaded"),
        ("quantisation", found.quantization or "none"),
        ("dtype here", found.dtype),
        *((name, "none" if ids is None else str(ids)) for name, ids in found.special_ids.items()),
        ("tokenizer", answer(found.has_tokenizer)),
        ("chat template", answer(found.has_chat_template)),
        ("weights in memory", size(found.num_weight_bytes)),
        ("KV cache per token", number(found.num_cache_bytes_per_token, " bytes")),
        (f"memory for {found.num_users} x {found.num_tokens} tokens", size(found.num_bytes)),
    ]
    table = new_table("", "", show_header=False)
    for name, value in rows:
        if value:
            table.add_row(name, value)
    Console().print(table)
    if found.unsupported_reason is not None:
        print(f"not supported: {found.unsupported_reason}")
