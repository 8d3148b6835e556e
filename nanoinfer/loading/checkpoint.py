"""Find a checkpoint by a folder, a GGUF file or a hub name: config.json, generation_config.json, the paths of the weights.

In: the user's name for the model. Out: a Checkpoint, plain data, which opens its weights and its tokenizer. The other formats
(features/formats) are subclasses.
"""

import hashlib
import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Self, cast

from nanoinfer.errors import CheckpointError, CheckpointNotFoundError, first_line, first_ten, shown
from nanoinfer.loading.folders import BUNDLED, bundled_models, list_bundled, list_folder

if TYPE_CHECKING:
    from nanoinfer.loading.weights import Weights
    from nanoinfer.tokenization.tokenizer import Tokenizer

DEFAULT_MODEL = "tiny-qwen3"

# The suffix of the files with the weights -> "module:class", a Checkpoint, imported when it is first used. The first of which a
# folder has a file counts. All but safetensors may also be a single file instead of a folder.
FORMATS = {
    ".safetensors": "nanoinfer.loading.checkpoint:Checkpoint",
    ".gguf": "nanoinfer.features.formats.gguf_families:GGUFCheckpoint",
}
# What unpacks the tensors of a config.json with quantization_config: (files, settings, path of config.json) -> Weights
PACKED = "nanoinfer.features.formats.packed:open_packed"

# All files that a checkpoint needs. The hub also has .bin, .gguf and .onnx files, which are not loaded.
TEXT_FILES = ["*.json", "*.txt", "*.jinja", "*.model"]
WEIGHT_FILES = ["*.safetensors"]
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # a LoRA adapter, as peft saves it
MAX_TOKENIZER_BYTES = 2**26  # for a single file. Gemma 3's tokenizer.json has 33 MB
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")  # name beginnings
MAX_JSON_BYTES = 2**22  # for a config or an index. The index of a model of 72B parameters has 80 kB

# Defaults of requests in generation_config.json -> the names of SamplingParams
_DEFAULTS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_DEFAULTS |= {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
_DEFAULTS |= {"no_repeat_ngram_size": "no_repeat_ngram_size", "bad_words_ids": "bad_words"}
# Its other fields that change transformers' answers -> the value that changes nothing, as None, [] and {} do for all.
_NOT_APPLIED: dict[str, int | None] = dict.fromkeys(
    "suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id force_words_ids constraints sequence_bias "
    "exponential_decay_length_penalty watermarking_config dola_layers".split()
)
_NOT_APPLIED |= dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "token_healing", "top_h", "max_time"), 0)
_NOT_APPLIED |= dict.fromkeys(("num_beams", "num_return_sequences", "typical_p", "encoder_repetition_penalty"), 1)
_NOT_APPLIED |= {"guidance_scale": 1, "min_length": 0, "max_length": 20}

_CONVERT = (
    "nanoinfer reads safetensors only, because a .bin file is a pickle and may run code. Convert it once, load the result: "
    'python -c "from transformers import AutoModelForCausalLM, AutoTokenizer; '
    "AutoModelForCausalLM.from_pretrained('{model}').save_pretrained('converted'); "
    "AutoTokenizer.from_pretrained('{model}').save_pretrained('converted')\""
)


@dataclass(frozen=True)
class Checkpoint:
    """One model's files."""

    path: Path  # the folder, or the single file
    config: dict[str, Any]  # config.json, or what corresponds to it in another format
    generation_config: dict[str, Any]  # generation_config.json, {} without the file
    weight_files: list[Path]  # the safetensors files, in the index's order
    weight_map: dict[str, str] = field(default_factory=dict)  # the index: tensor -> name of its file. {} without an index

    @classmethod
    def open(cls, model: str | None = None, revision: str | None = None) -> "Checkpoint":
        """Find a checkpoint and read its JSON files. The arguments are those of EngineArgs (config.py).

        A hub name is downloaded unless the hub's cache has it. With HF_HUB_OFFLINE=1 only the cache is used.
        """
        model = DEFAULT_MODEL if model is None else model
        path = locate(model, revision)
        suffixes = {Path(name).suffix for name in ([path.name] if path.is_file() else _names(path))}
        place = next((place for suffix, place in FORMATS.items() if suffix in suffixes), FORMATS[".safetensors"])
        checkpoint: Checkpoint = resolve_name(place).read(path, model)
        return checkpoint

    @classmethod
    def read(cls, path: Path, model: str) -> Self:
        """Read the JSON files of a folder. model: the name for which the folder was found, for errors."""
        config = read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation_config = read_json(generation_path) if generation_path.exists() else {}
        return cls(path, config, generation_config, *_weight_files(path, _names(path), model))

    @property
    def config_path(self) -> Path:
        """The file from which `config` was read."""
        return self.path if self.path.is_file() else self.path / "config.json"

    def open_weights(self) -> "Weights":
        """Return the tensors under the model's names, whatever the format in which they are stored."""
        from nanoinfer.loading.weights import WeightFiles, divided
        from nanoinfer.models.registry import find_model

        files: Weights = WeightFiles(self.weight_files, self.weight_map)
        if settings := self.config.get("quantization_config"):
            files = resolve_name(PACKED)(files, settings, self.config_path)
        return divided(files, find_model(self.config).weight_rules)

    def load_tokenizer(self) -> "Tokenizer | None":
        """Load the tokenizer. None: it has none."""
        return load_tokenizer(self.path)

    @property
    def is_bundled(self) -> bool:
        """Whether it lies in the package."""
        return self.path.parent == BUNDLED

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The defaults in generation_config.json, by the names of SamplingParams. "do_sample": false is a temperature of 0."""
        given = self.generation_config
        samples = given.get("do_sample")
        if not isinstance(samples, bool | None):
            raise CheckpointError(f"do_sample must be true or false, got {shown(samples)}")
        defaults = {ours: given[theirs] for theirs, ours in _DEFAULTS.items() if given.get(theirs) not in (None, "", [""])}
        return defaults | ({"temperature": 0.0} if samples is False else {})

    def settings_not_applied(self) -> str:
        """Name the fields of generation_config.json that change transformers' answers, and none here. "": there are none."""
        given = self.generation_config
        names = (name for name, neutral in _NOT_APPLIED.items() if given.get(name) not in (None, neutral, [], {}))
        return ", ".join(f"{name}={shown(given[name])}" for name in names)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text: from generation_config.json, or from config.json if that has none."""
        settings = self.config if self.generation_config.get("eos_token_id") is None else self.generation_config
        eos = settings.get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(type(token_id) is int for token_id in ids):
            raise CheckpointError(f"eos_token_id in {self.path} must be an id or a list of ids, got {shown(eos)}")
        return frozenset(ids)


def locate(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Return the folder or single file of that name. A hub name is downloaded: whole, or without weights for a tokenizer."""
    if not model:
        raise CheckpointNotFoundError(f"the model's name is empty; {list_bundled()}")
    try:
        path = Path(model).expanduser()
        model.encode()  # the libraries below accept only UTF-8
        is_file = path.is_file()
        is_checkpoint = path.is_dir() or (is_file and path.suffix in FORMATS.keys() - {".safetensors"})
    except (OSError, ValueError, RuntimeError) as error:  # too long, no permission, not Unicode, a ~user that does not exist
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointNotFoundError(f"{shown(model)} cannot be used as a folder ({reason}); {list_bundled()}") from error
    if not is_checkpoint and model in bundled_models():
        path, is_checkpoint = BUNDLED / model, True
    if is_checkpoint:
        if revision is not None:
            raise CheckpointError(f"{path} is on this machine and has no revision {shown(revision)}; leave revision out")
        return path
    if is_file:
        raise CheckpointNotFoundError(f"{shown(model)} is a file; give the folder that it lies in, with its config.json")
    from nanoinfer.loading.hub import download

    return download(model, revision, TEXT_FILES + WEIGHT_FILES if with_weights else TEXT_FILES)


def load_tokenizer(path: Path) -> "Tokenizer | None":
    """Load the tokenizer of a folder or a single file. None: it has none."""
    if path.is_file():
        return cast("Tokenizer | None", resolve_name(FORMATS[path.suffix]).tokenizer_of(path))
    # Refuse files on which transformers would hang or spend a long time. It chooses among many names.
    for file_path in (*path.iterdir(), *path.glob("additional_chat_templates/*")):
        if file_path.suffix in (".json", ".txt", ".jinja", ".model") and file_path.exists() and not file_path.is_dir():
            check_file(file_path, MAX_TOKENIZER_BYTES if file_path.name.startswith(_TOKENIZER_FILES) else None)
    from nanoinfer.tokenization.tokenizer import Tokenizer

    return Tokenizer.load(path)


def file_digests(path: Path) -> dict[str, str]:
    """Return a digest of a single file, or of each file in a folder that may change a model's answers, by the file's name."""
    patterns = [*TEXT_FILES, *(f"*{suffix}" for suffix in FORMATS)]
    digests = {}
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if not file.is_file() or not any(map(file.match, patterns)):
            continue
        with file.open("rb") as content:
            digests[file.name] = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return digests


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """Refuse a path that cannot be read to its end: a pipe or a device blocks or never ends, and a folder is not a file.

    Symbolic links are followed, as the hub's cache is made of them.
    """
    try:
        info = path.stat()
        is_regular = stat.S_ISREG(info.st_mode)
        if is_regular:  # opening a pipe waits for its other end
            path.open("rb").close()
    except FileNotFoundError as error:
        if path.name == "config.json":
            _refuse_adapter(path.parent)
            _refuse_cache(path.parent)
        raise CheckpointNotFoundError(
            f"{path} does not exist; a checkpoint is a folder with config.json and weights"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not is_regular:
        raise CheckpointError(f"{path} cannot be read: it is not a regular file")
    if max_bytes is not None and info.st_size > max_bytes:
        raise CheckpointError(f"{path} has {info.st_size} bytes; at most {max_bytes} are read of such a file")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    check_file(path, MAX_JSON_BYTES)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is not valid JSON (nested too deeply); download it again") from error
    except ValueError as error:  # not UTF-8, not JSON, or an integer of more than 4,300 digits
        raise CheckpointError(f"{path} is not valid JSON ({first_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _refuse_adapter(path: Path) -> None:
    """Refuse a folder without a model of its own if it is a LoRA adapter, with the name of its base model."""
    if not (path / ADAPTER_CONFIG).exists():
        return
    base = shown(read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path") or "BASE_MODEL")
    hint = f"load its base model together with it: model={base}, lora={shown(str(path))}"
    raise CheckpointNotFoundError(f"{path} is a LoRA adapter, not a model; {hint}")


def _refuse_cache(path: Path) -> None:
    """Refuse a folder of the hub's cache, models--owner--name, with the folders in it that are models."""
    if snapshots := list_folder(path / "snapshots"):
        name = path.name.removeprefix("models--").replace("--", "/")
        folders = first_ten([str(path / "snapshots" / snapshot) for snapshot in sorted(snapshots)])
        raise CheckpointNotFoundError(
            f"{path} is a folder of the hub's cache; give the name {name!r}, or a snapshot: {folders}"
        )


def _names(path: Path) -> set[str]:
    """Return the names of a folder's files, without the weights of an adapter."""
    names = set(list_folder(path))
    return names - {ADAPTER_WEIGHTS} if ADAPTER_CONFIG in names else names


def _weight_files(path: Path, present: set[str], model: str) -> tuple[list[Path], dict[str, str]]:
    """Return the weights' files and weight_map: a single file, which transformers prefers too, or the shards of an index."""
    index_path, weight_map = path / "model.safetensors.index.json", {}
    if "model.safetensors" in present:
        names = ["model.safetensors"]
    elif index_path.name in present:
        weight_map = _read_index(index_path)
        names = list(dict.fromkeys(weight_map.values()))
    else:
        names = sorted(name for name in present if name.endswith(".safetensors"))
    if missing := [name for name in names if name not in present]:
        raise CheckpointNotFoundError(f"{index_path} names {first_ten(missing)}, not in the folder; download them too")
    if not names:
        _refuse_adapter(path)
        is_whole = Path(model).expanduser().is_dir()  # of the hub, only files that can be read were downloaded
        if is_whole and not any(name.endswith((".bin", ".pt", ".pth")) for name in present):
            raise CheckpointNotFoundError(
                f"{path} holds no *.safetensors or *.gguf file, so it has no weights; put them beside its config.json, or "
                "download the model again"
            )
        raise CheckpointNotFoundError(f"{path} holds no *.safetensors file. " + _CONVERT.format(model=model))
    for name in names:
        check_file(path / name)
    return [path / name for name in names], weight_map


def _read_index(index_path: Path) -> dict[str, str]:
    """Return an index's weight_map. Its files are all in its own folder, because ../x would read files of the user's."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index_path} has no weight_map of file names; download it again")
    if outside := [name for name in dict.fromkeys(weight_map.values()) if Path(name).name != name]:
        raise CheckpointError(f"{index_path} names {first_ten(outside)}, outside its folder; download it again")
    return weight_map
