"""Qwen2, Qwen2.5 and Qwen3: RMSNorm, RoPE, grouped-query attention, SwiGLU. Options distinguish them:

    qkv_bias   Qwen2 and Qwen2.5 always, Qwen3 with attention_bias
    o_bias     Qwen3 with attention_bias, Qwen2 never
    qk_norm    Qwen3: an RMSNorm over each head of q and of k, before the rotation

windows.py has the attention of checkpoints with use_sliding_window. Other families replace parts of these modules by their own.

Source: https://arxiv.org/abs/2407.10671 (Qwen2), https://arxiv.org/abs/2505.09388 (Qwen3). The names are the checkpoints'.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.errors import CheckpointError, shown
from nanoinfer.models.layers import Angles, Embedding, Hidden, Ids, RMSNorm, RotaryEmbedding, SwiGLU, apply_rotary
from nanoinfer.models.registry import ConfigJson, WeightRules, refuse_others
from nanoinfer.models.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class QwenConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "QwenConfig":
        """Read config.json. Raises: UnsupportedError (a variant), CheckpointError (a range), KeyError (a missing key)."""
        is_qwen3 = config["model_type"] == "qwen3"
        attention_bias = is_qwen3 and config.get("attention_bias", False)
        # Without head_dim, Qwen3 has 128 for every hidden size. Qwen2's config.json has no head_dim.
        fields = shared_fields(config, default_head_dim=128 if is_qwen3 else None)
        fields |= {"qkv_bias": not is_qwen3 or attention_bias, "o_bias": attention_bias, "qk_norm": is_qwen3}
        if config.get("use_sliding_window") or any(kind != "full_attention" for kind in config.get("layer_types") or ()):
            from nanoinfer.models.windows import WindowedConfig, layer_windows

            if windows := layer_windows(config, fields["max_position_embeddings"], None):
                fields["layer_windows"] = windows
                return (WindowedConfig if cls is QwenConfig else cls)(**fields)
        return cls(**fields)

    def make_attention(self, layer: int) -> "QwenAttention":
        return QwenAttention(self, layer)


def shared_fields(config: ConfigJson, *, default_head_dim: int | None = None, **options: bool) -> dict[str, Any]:
    """Return the fields of QwenConfig that config.json spells alike for Qwen and Llama. Raises: the errors of from_hf.

    options: the options of RopeConfig.from_hf.
    """
    refuse_others(config, hidden_act=("silu",))
    num_heads = config["num_attention_heads"]
    if config["max_position_embeddings"] < 1:
        given = shown(config["max_position_embeddings"])
        raise CheckpointError(f"max_position_embeddings must be a number >= 1, got {given}; download it again")
    rope = RopeConfig.from_hf(config, **options)
    head_dim = config.get("head_dim") or default_head_dim or config["hidden_size"] // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim must be even, because RoPE rotates pairs, got {shown(head_dim)}")
    # A checkpoint with YaRN may still name the length before the scaling.
    length = max(config["max_position_embeddings"], rope.max_position_embeddings)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {name: config[name] for name in sizes} | {
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "rope": rope,
    }


class QwenAttention(nn.Module):
    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Attend) -> Hidden:
        heads = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, heads)  # [num_tokens, num_heads, head_dim]
        k = self.k_proj(x).unflatten(-1, heads)  # [num_tokens, num_kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, heads)  # [num_tokens, num_kv_heads, head_dim]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.o_proj(self.attention(attend, q, k, v).flatten(1))

    def attention(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.layer, q, k, v)


class QwenDecoderLayer(nn.Module):
    def __init__(self, config: QwenConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = config.make_attention(layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Attend) -> Hidden:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenForCausalLM(nn.Module):
    Config: ClassVar[type[QwenConfig]] = QwenConfig
    weight_rules = WeightRules(
        prefix="model.",
        embedding="embed_tokens.weight",
        skip=("rotary_emb.inv_freq",),  # computed here
    )

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(QwenDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden:
        x = self.embed_tokens(input_ids)  # [num_tokens, hidden]
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        return self.lm_head(hidden)
