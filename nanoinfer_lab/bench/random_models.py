"""Known models with random weights, because speed does not depend on the weights' values.

In: a model's name. Out: a folder with config.json and safetensors, in the hub's format. Nothing is downloaded.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanoinfer.config import DTYPES
from nanoinfer.errors import InvalidValueError

# name -> (config class of transformers, arguments that differ from the defaults, the published checkpoint's dtype)
RANDOM_MODELS: dict[str, tuple[str, dict[str, object], str]] = {
    "gpt2": ("GPT2Config", {}, "float32"),
    "gpt2-medium": ("GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "float32"),
    "qwen2.5-0.5b": ("Qwen2Config", {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }, "bfloat16"),
    "qwen3-0.6b": ("Qwen3Config", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }, "bfloat16"),
    "qwen3.5-0.8b": ("Qwen3_5TextConfig", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    }, "bfloat16"),
}  # fmt: skip


def write_checkpoint(name: str, folder: Path, dtype: str = "auto") -> None:
    """Write config.json and safetensors of one of RANDOM_MODELS, with random weights of standard deviation 0.02.

    dtype: the dtype of the weights. "auto": the published checkpoint's. Raises: InvalidValueError if a name is unknown.
    """
    import transformers

    if dtype not in DTYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if name not in RANDOM_MODELS:
        raise InvalidValueError(f"random_model must be one of {', '.join(RANDOM_MODELS)}, got {name!r}")
    config_class, arguments, published_dtype = RANDOM_MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, published_dtype if dtype == "auto" else DTYPES[dtype])
    )
    model.save_pretrained(folder)


@contextmanager
def checkpoint_of(model: str | None, random_model: str | None, dtype: str) -> Iterator[str | None]:
    """Yield the model's name, or a temporary folder with the random model. Raises: InvalidValueError if both are given."""
    if model is not None and random_model is not None:
        raise InvalidValueError(f"give a model or a random_model, not both, got {model!r} and {random_model!r}")
    if random_model is None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(random_model, Path(folder), dtype)
        yield folder
