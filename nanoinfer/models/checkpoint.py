"""A folder or a hub name -> the files of one checkpoint: config.json, generation_config.json, the paths of the weights.

In: the user's name for the model. Out: a Checkpoint, plain data. This file opens JSON only. weights.py reads the tensors.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from nanoinfer.errors import CheckpointError, CheckpointNotFoundError

BUNDLED = Path(__file__).parent.parent / "bundled"
DEFAULT_MODEL = "tiny-qwen3"

# Everything that a checkpoint needs. The hub also has .bin, .gguf and .onnx files, and folders of them, which are not loaded.
_TEXT_FILES = ["*.json", "*.txt", "*.jinja", "*.model"]
_WEIGHT_FILES = ["*.safetensors"]

_CONVERT = (
    "nanoinfer reads safetensors only, because a .bin file is a pickle and may run code. Convert it once, load the result:\n"
    '  python -c "from transformers import AutoModelForCausalLM, AutoTokenizer; '
    "AutoModelForCausalLM.from_pretrained('{model}').save_pretrained('converted'); "
    "AutoTokenizer.from_pretrained('{model}').save_pretrained('converted')\""
)


@dataclass(frozen=True)
class Checkpoint:
    """One model's files.

    Attributes:
        path: the folder.
        config: config.json.
        generation_config: generation_config.json, {} where there is none.
        weight_files: the safetensors files, in the index's order.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weight_files: list[Path]

    @classmethod
    def open(cls, model: str | None = None, revision: str | None = None) -> "Checkpoint":
        """Find a checkpoint and read its JSON files.

        Args:
            model: a folder, the name of a bundled model ("tiny-qwen3", "tiny-gpt2"), or a hub name such as
                "Qwen/Qwen3-0.6B", which is downloaded to the hub's cache unless it is there (HF_HUB_OFFLINE=1 uses the
                cache alone). None is tiny-qwen3.
            revision: a branch, tag or commit of the hub's repository.

        Raises:
            CheckpointNotFoundError, CheckpointError
        """
        model = DEFAULT_MODEL if model is None else model
        path = locate(model, revision)
        config = _read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation_config = _read_json(generation_path) if generation_path.exists() else {}
        return cls(path, config, generation_config, _weight_files(path, model))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: from generation_config.json, or from config.json where that has none."""
        eos = self.generation_config.get("eos_token_id")
        if eos is None:
            eos = self.config.get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(type(token_id) is int for token_id in ids):
            raise CheckpointError(f"eos_token_id in {self.path} must be an id or a list of ids, got {eos!r}")
        return frozenset(ids)


def locate(model: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Return the folder that `model` names. A hub name is downloaded: whole, or without weights for a tokenizer."""
    if not model:
        raise CheckpointNotFoundError(f"the model's name is empty; {_list_bundled()}")
    for folder in (Path(model).expanduser(), BUNDLED / model):
        if folder.is_dir():
            if revision is not None:
                raise CheckpointError(f"{folder} is a folder and has no revision {revision!r}; leave revision out")
            return folder
    if Path(model).is_file():
        raise CheckpointNotFoundError(f"{model!r} is a file; give the folder that it lies in, with its config.json")
    if Path(model).is_absolute() or model.startswith((".", "~")):
        raise CheckpointNotFoundError(f"there is no folder {model!r}; give a checkpoint's folder or a hub name")
    patterns = _TEXT_FILES + _WEIGHT_FILES if with_weights else _TEXT_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise CheckpointNotFoundError(
            f"{model!r} is neither a folder nor a possible hub name (owner/name); {_list_bundled()}"
        ) from error
    except Exception as error:  # the hub's own errors, and those of its HTTP library without a network
        raise CheckpointNotFoundError(
            f"{model!r} is no folder here, and the hub did not give it (revision {revision or 'main'}): "
            f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}\n"
            f"Check the name, the network and HF_HUB_OFFLINE, or use a folder; {_list_bundled()}"
        ) from error


def bundled_models() -> list[str]:
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def _list_bundled() -> str:
    return f"bundled are {', '.join(bundled_models())}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{path} does not exist; a checkpoint is a folder with config.json and weights"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _weight_files(path: Path, model: str) -> list[Path]:
    """The files of one set of weights: one file, or the shards of an index. As in transformers, one file takes precedence."""
    index_path = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    elif index_path.exists():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index_path} has no weight_map of file names; download it again")
        files = [path / name for name in dict.fromkeys(weight_map.values())]
    else:
        files = sorted(path.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.exists()]:
        raise CheckpointNotFoundError(f"{index_path} names {', '.join(missing)}, not in the folder; download them too")
    if not files:
        raise CheckpointNotFoundError(f"{path} holds no *.safetensors file. " + _CONVERT.format(model=model))
    return files
