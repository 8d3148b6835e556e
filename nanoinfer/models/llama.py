"""Llama and Mistral: the layers of qwen.py, with other options. Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2, Yi, Mistral.

    qkv_bias, o_bias   Llama with attention_bias
    mlp_bias           Llama with mlp_bias
    qk_norm            never
    window             Mistral with sliding_window, in all layers

Source: https://arxiv.org/abs/2302.13971 (Llama), https://arxiv.org/abs/2310.06825 (Mistral). The names are those of their
checkpoints. Llama came first. Qwen took its architecture and added the options.
"""

from dataclasses import dataclass

from nanoinfer.models.layers import SwiGLU
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.registry import ConfigJson
from nanoinfer.models.windows import WindowedConfig, windowed_fields


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(WindowedConfig):
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "LlamaConfig":
        """Read config.json. Raises: as QwenConfig.from_hf does."""
        slides = config["model_type"] == "mistral" and config.get("sliding_window", 4096) is not None  # as in transformers
        kinds = ["sliding_attention"] * config["num_hidden_layers"] if slides else []
        attention_bias = config.get("attention_bias", False)
        biases = {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": config.get("mlp_bias", False)}
        return cls(**windowed_fields(config, kinds), **biases)


class LlamaForCausalLM(QwenForCausalLM):
    Config = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers if config.mlp_bias else ():
            layer.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=True)
