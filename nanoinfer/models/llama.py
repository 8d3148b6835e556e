"""Llama and Mistral: the layers of qwen.py, with other options. Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2, Yi, Mistral.

    qkv_bias, o_bias   Llama with attention_bias
    mlp_bias           Llama with mlp_bias
    qk_norm            never

Source: https://arxiv.org/abs/2302.13971 (Llama), https://arxiv.org/abs/2310.06825 (Mistral). The names are those of their
checkpoints. Llama came first. Qwen took its architecture and added the options.
"""

import logging
from dataclasses import dataclass
from typing import Any

from nanoinfer.models.qwen import QwenConfig, QwenForCausalLM, shared_fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(QwenConfig):
    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "LlamaConfig":
        """Read config.json.

        Mistral with a sliding window is supported up to the length of the window, where it is full attention.

        Raises:
            UnsupportedError: a variant of Llama that is not supported.
            CheckpointError: a value out of its range.
            KeyError: a key that every Llama config has.
        """
        fields = shared_fields(config)
        window = config.get("sliding_window", 4096) if config["model_type"] == "mistral" else None  # as in transformers
        if window is not None and window < fields["max_position_embeddings"]:
            logger.warning(
                "sequences are limited to %d tokens, the sliding window of this checkpoint: beyond it, attention over a window "
                "is not supported", window,
            )  # fmt: skip
            fields["max_position_embeddings"] = window
        attention_bias = config.get("attention_bias", False)
        mlp_bias = config.get("mlp_bias", False)
        return cls(**fields, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=mlp_bias, qk_norm=False)


class LlamaForCausalLM(QwenForCausalLM):
    Config = LlamaConfig
