"""Checkpoints that sentence-transformers describes, for tests of embeddings and scores."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.helpers import tiny_models
from tests.helpers.tool_cases import BUNDLED

POOLING = {
    "newer": {"embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": True},
    "older": {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True},
    "last": {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True},
}
NEWER = "sentence_transformers.base.modules.transformer.Transformer"


def write_modules(path: Path, *modules: str, **settings: dict) -> Path:
    """modules.json with these types, and the settings of each by the name of its class."""
    folders = ["" if i == 0 else f"{i}_{one.rpartition('.')[2]}" for i, one in enumerate(modules)]
    rows = [{"idx": i, "name": str(i), "path": folders[i], "type": one} for i, one in enumerate(modules)]
    (path / "modules.json").write_text(json.dumps(rows))
    for one, folder in zip(modules, folders, strict=True):
        if (name := one.rpartition(".")[2]) in settings:
            (path / folder).mkdir(exist_ok=True)
            (path / folder / "config.json").write_text(json.dumps(settings[name]))
    return path


def save_reranker(path: Path) -> Path:
    """Random weights with a tokenizer that has "no" and "yes", and ends each text by an EOS, as that of Qwen3-Embedding."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_tokens(["no", "yes"])
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    tiny_models.save("qwen3_tied", path, vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(path)
    return path


def save_embedding(reranker: Path, path: Path) -> Path:
    """The same model as an embedding model with mean pooling, without a head, as AutoModel saves it."""
    shutil.copytree(reranker, path)
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return write_modules(
        path, NEWER, "sentence_transformers.models.Pooling", "sentence_transformers.models.Normalize", Pooling=POOLING["newer"]
    )
