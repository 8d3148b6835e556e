"""Gemma 3, the text models: a layer of qwen.py between four norms, with attention over a window in five of six layers.

    norms       their weights are zero-centred (layers.py). Each half of a layer has a norm before and after it
    window      in sliding layers, whose RoPE has its own base, and no scaling
    scores      q . k / sqrt(query_pre_attn_scalar)
    embedding   times sqrt(hidden_size), rounded to the dtype

Source: https://arxiv.org/abs/2503.19786. The names are those of its checkpoints.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.errors import CheckpointError, shown
from nanoinfer.models.layers import Angles, Hidden, Ids, RotaryEmbedding, SwiGLU, ZeroCentredRMSNorm, gelu_tanh
from nanoinfer.models.qwen import QwenDecoderLayer, QwenForCausalLM
from nanoinfer.models.registry import ConfigJson, refuse_others
from nanoinfer.models.rope import RopeConfig
from nanoinfer.models.windows import WindowedAttention, WindowedConfig, windowed_fields


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(WindowedConfig):
    local_rope: RopeConfig  # the RoPE of the sliding layers
    query_pre_attn_scalar: float
    is_sliding: tuple[bool, ...]  # whether each layer slides, which gives it local_rope even without long texts

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "Gemma3Config":
        """Read config.json as older (rope_theta, sliding_window_pattern) and newer transformers write it.

        Raises: the errors of QwenConfig.from_hf.
        """
        caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,))
        refuse_others(config, hidden_activation=("gelu_pytorch_tanh", None), **caps)
        ropes = config.get("rope_parameters") or {}
        rope = {"rope_theta": config.get("rope_theta", 1e6)} | (ropes.get("full_attention") or {"rope_type": "default"})
        rope |= config.get("rope_scaling") or {}  # for the layers with full attention
        local = {"rope_theta": config.get("rope_local_base_freq", 1e4)} | (ropes.get("sliding_attention") or {})
        for parameters in (rope, local):
            refuse_others(parameters, truncate=(True,))  # transformers reads the field in no layer
        pattern = config.get("sliding_window_pattern", 6)
        kinds = config.get("layer_types") or [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(config["num_hidden_layers"])
        ]
        if len(kinds) != config["num_hidden_layers"]:
            num_layers = shown(config["num_hidden_layers"])
            raise CheckpointError(f"layer_types must name a kind for each of {num_layers} layers, got {shown(kinds)}")
        # Each kind of layers has its own RoPE, and they share no field of it.
        config = {"tie_word_embeddings": True, "head_dim": 256} | config | {"hidden_act": "silu"}
        config |= {"rope_scaling": None, "original_max_position_embeddings": None}
        bias = config.get("attention_bias", False)
        return cls(
            **windowed_fields(config | {"rope_parameters": rope}, kinds),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            local_rope=RopeConfig.from_hf(config | {"rope_parameters": local}),
            query_pre_attn_scalar=config.get("query_pre_attn_scalar", 256),
            is_sliding=tuple(kind == "sliding_attention" for kind in kinds),
        )

    def make_attention(self, layer: int) -> "Gemma3Attention":
        return Gemma3Attention(self, layer)


class GeGLU(SwiGLU):
    """Computes down(gelu(gate(x)) * up(x)), as in SwiGLU's paper."""

    def forward(self, x: Hidden) -> Hidden:
        return self.down_proj(gelu_tanh(self.gate_proj(x)) * self.up_proj(x))


class Gemma3Attention(WindowedAttention):
    def __init__(self, config: Gemma3Config, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.query_scale = (config.head_dim / config.query_pre_attn_scalar) ** 0.5  # because attend divides by sqrt(head_dim)

    def attention(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attention(attend, q if self.query_scale == 1.0 else q * self.query_scale, k, v)


class Gemma3DecoderLayer(QwenDecoderLayer):
    def __init__(self, config: Gemma3Config, layer: int) -> None:
        super().__init__(config, layer)
        self.is_sliding = config.is_sliding[layer]
        self.input_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GeGLU(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Attend) -> Hidden:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, attend))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3ForCausalLM(QwenForCausalLM):
    Config = Gemma3Config

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Gemma3DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.local_rotary_emb = RotaryEmbedding(config.head_dim, config.local_rope)

    def forward(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden]
        x = x * x.new_full((1, 1), self.config.hidden_size**0.5)
        cos, sin = self.rotary_emb(positions, x.dtype)
        local_cos, local_sin = self.local_rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, local_cos, local_sin, attend) if layer.is_sliding else layer(x, cos, sin, attend)
        return self.norm(x)
