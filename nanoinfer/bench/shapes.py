"""Checkpoints of random weights in the shapes of known models, because speed does not depend on the weights' values.

In: a shape's name. Out: a folder with config.json and safetensors, in the hub's format. Nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import torch

from nanoinfer.config import DTYPES
from nanoinfer.errors import InvalidValueError

# name -> (config class of transformers, arguments that differ from the defaults, the published checkpoint's dtype)
SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2Config", {}, "float32"),
    "gpt2-medium": ("GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "float32"),
    "qwen2.5-0.5b": (
        "Qwen2Config",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        "bfloat16",
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        "bfloat16",
    ),
}


def write_checkpoint(shape: str, folder: Path, dtype: str = "auto") -> None:
    """Write random weights with a standard deviation of 0.02.

    Args:
        shape: a name in SHAPES.
        folder: gets config.json and safetensors.
        dtype: of the weights in the file. "auto" is the published checkpoint's.

    Raises:
        InvalidValueError: the shape or the dtype is unknown.
    """
    import transformers

    if dtype not in DTYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if shape not in SHAPES:
        raise InvalidValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    config_class, arguments, published_dtype = SHAPES[shape]
    config = getattr(transformers, config_class)(**arguments)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, published_dtype if dtype == "auto" else DTYPES[dtype])
    )
    model.save_pretrained(folder)
