"""gpt-oss: layers of qwen.py with a mixture of experts, biases everywhere, attention sinks, and a window in every other layer.

    sinks     a learned score for each head. Its share of the softmax has no value (features/hybrid/attention.py)
    window    in the layers that layer_types calls sliding_attention: every other layer, from the first on
    router    has a bias. The softmax is over the scores of the chosen experts only
    experts   a clamped SwiGLU with biases, in every layer
    RoPE      YaRN whose ramp may begin and end between two pairs (truncate=false)

Source: https://arxiv.org/abs/2508.10925. Its checkpoints store all experts of a layer in a single tensor, which
features/formats/experts.py divides. The other names are those of the checkpoints.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor, empty, nn
from torch.overrides import wrap_torch_function

from nanoinfer.attention.base import Attend
from nanoinfer.models.layers import Hidden, SwiGLU, sigmoid
from nanoinfer.models.qwen import QwenDecoderLayer, QwenForCausalLM
from nanoinfer.models.qwen_moe import Experts, expert_fields
from nanoinfer.models.registry import ConfigJson, WeightRules
from nanoinfer.models.windows import WindowedAttention, WindowedConfig, windowed_fields

_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}  # the default


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(WindowedConfig):
    has_sinks: ClassVar[bool] = True  # not every attention backend supports them
    num_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "GptOssConfig":
        """Read config.json. Raises: the errors of QwenConfig.from_hf."""
        defaults: ConfigJson = {"rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0}
        config = defaults | config
        if config.get("rope_parameters") is None and not config.get("rope_scaling"):
            config = config | {"rope_parameters": _ROPE}
        kinds = config.get("layer_types") or [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])
        ]
        bias = config.get("attention_bias", True)
        return cls(
            **windowed_fields(config, kinds),
            **expert_fields(config),
            qkv_bias=bias,
            o_bias=bias,
            swiglu_alpha=config.get("swiglu_alpha", 1.702),
            swiglu_limit=config.get("swiglu_limit", 7.0),
        )

    def make_attention(self, layer: int) -> "GptOssAttention":
        return GptOssAttention(self, layer)

    @property
    def sparse_layers(self) -> range:
        """The indices of the layers that have experts."""
        return range(self.num_hidden_layers)


class GptOssAttention(WindowedAttention):
    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(empty(config.num_attention_heads))

    def attention(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.layer, q, k, v, window=self.window, sinks=self.sinks)


class ClampedSwiGLU(SwiGLU):
    """Computes down((up + 1) * gate * sigmoid(alpha * gate)), with gate at most `limit`, and up in -limit .. limit."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, bias=True)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def forward(self, x: Hidden) -> Hidden:
        gate = self.gate_proj(x).clamp(max=self.limit)  # [num_tokens, intermediate]
        up = self.up_proj(x).clamp(-self.limit, self.limit)  # [num_tokens, intermediate]
        return self.down_proj((up + 1) * (gate * sigmoid(self.alpha * gate)))


@wrap_torch_function(lambda scores, k: (scores,))
def route_among_chosen(
    scores: Float[Tensor, "num_tokens num_experts"], k: int
) -> tuple[Float[Tensor, "num_tokens k"], Int[Tensor, "num_tokens k"]]:
    """Choose the k experts of each token with the largest scores. Returns the softmax of these, in fp32, and numbers."""
    largest, chosen = scores.float().topk(k, dim=-1)
    return largest.softmax(dim=-1), chosen


class GptOssExperts(nn.Module):
    """Computes the sum of weight_e * expert_e(x) over the experts e that the router chooses for x."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.router = nn.Linear(config.hidden_size, config.num_experts)
        self.experts = Experts(ClampedSwiGLU(config) for _ in range(config.num_experts))

    def forward(self, x: Hidden) -> Hidden:
        weights, chosen = route_among_chosen(self.router(x), self.num_experts_per_tok)
        return self.experts.weighted_sum(x, weights, chosen).to(x.dtype)


class GptOssDecoderLayer(QwenDecoderLayer):
    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp = GptOssExperts(config)  # type: ignore[assignment]  # in the place of the dense one


class GptOssForCausalLM(QwenForCausalLM):
    Config = GptOssConfig
    weight_rules = WeightRules(prefix="model.", embedding="embed_tokens.weight", fused_experts="interleaved")

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(GptOssDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
