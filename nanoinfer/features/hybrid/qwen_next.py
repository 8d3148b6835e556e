"""Qwen3-Next and Qwen3.5, their text models: three of four layers have a state (gated_delta.py), the fourth has attention.

    RMSNorm      zero-centred: the weight of a checkpoint is added to 1
    attention    gated: q_proj also gives a gate for each number of the output. Only a part of each head is rotated
    projections  of a layer with a state: Qwen3-Next stores q, k, v and z in one matrix, and b and a in another, with the rows
                 of a key head together. Qwen3.5 has a matrix for q, k and v, and one each for z, b and a
    MLP          Qwen3.5: SwiGLU. Qwen3-Next and Qwen3.5-MoE: experts, with a shared expert (qwen_moe.py)

Source: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, and gated_delta.py. The names are the checkpoints'.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.errors import CheckpointError, shown
from nanoinfer.features.hybrid.gated_delta import DeltaRecurrence
from nanoinfer.features.hybrid.states import Recur
from nanoinfer.models.layers import Angles, Hidden, RMSNorm, RotaryEmbedding, ZeroCentredRMSNorm, partial_rotary, sigmoid
from nanoinfer.models.qwen import QwenAttention, QwenForCausalLM, shared_fields
from nanoinfer.models.qwen_moe import QwenMoeConfig, QwenMoeDecoderLayer, QwenMoeForCausalLM, expert_fields
from nanoinfer.models.registry import ConfigJson, refuse_others

LAYER_TYPES = ("linear_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class QwenNextConfig(QwenMoeConfig):
    """The fields of QwenMoeConfig, without those of experts if the model has none, and the following fields."""

    layer_types: tuple[str, ...]  # the kind of each layer, of LAYER_TYPES
    rotary_dim: int  # how many numbers of a head are rotated, from the first on
    linear_num_key_heads: int  # in a layer with a state. Each serves equally many value heads
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "QwenNextConfig":
        """Read config.json. Raises: the errors of QwenConfig.from_hf."""
        is_next, has_experts = config["model_type"] == "qwen3_next", config["model_type"] != "qwen3_5_text"
        refuse_others(config, attention_bias=(False, None))
        num_layers = config["num_hidden_layers"]
        interval = config.get("full_attention_interval", 4)
        layer_types = config.get("layer_types") or [LAYER_TYPES[(i + 1) % interval == 0] for i in range(num_layers)]
        if len(layer_types) != num_layers or not {"full_attention"} <= {*layer_types} <= {*LAYER_TYPES}:
            raise CheckpointError(
                f"layer_types must name one of {', '.join(LAYER_TYPES)} for each of {shown(num_layers)} layers, and "
                f"full_attention at least once, got {shown(layer_types)}"
            )
        # In Qwen3.5-MoE every layer has experts, so its config has no intermediate_size.
        defaults = {"intermediate_size": config.get("moe_intermediate_size"), "partial_rotary_factor": 0.25}
        fields = shared_fields(defaults | config, default_head_dim=256, allows_partial=True)
        share = fields["rope"].partial_rotary_factor
        rotary_dim = int(fields["head_dim"] * share)
        if not 0 < rotary_dim <= fields["head_dim"] or rotary_dim % 2:
            raise CheckpointError(
                f"partial_rotary_factor must make an even part of {fields['head_dim']} numbers (head_dim), got {shown(share)}"
            )
        linear = {name: config[name] for name in cls.__annotations__ if name.startswith("linear_")}
        num_key_heads, num_value_heads = linear["linear_num_key_heads"], linear["linear_num_value_heads"]
        if num_value_heads % num_key_heads:
            raise CheckpointError(
                f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {shown(num_value_heads)} and "
                f"{shown(num_key_heads)}"
            )
        of_next = config if is_next else {}  # Qwen3.5 has experts in all layers or none, and always normalises their weights
        return cls(
            **fields,
            **linear,
            layer_types=tuple(layer_types),
            rotary_dim=rotary_dim,
            qk_norm=True,
            **(expert_fields(config) if has_experts else {"num_experts": 1, "num_experts_per_tok": 1}),
            moe_intermediate_size=config["moe_intermediate_size"] if has_experts else 1,
            shared_expert_intermediate_size=config["shared_expert_intermediate_size"] if has_experts else None,
            norm_topk_prob=of_next.get("norm_topk_prob", True),
            decoder_sparse_step=of_next.get("decoder_sparse_step", 1),
            mlp_only_layers=tuple((of_next.get("mlp_only_layers") or ()) if has_experts else range(num_layers)),
        )

    @property
    def num_attention_layers(self) -> int:
        """The number of layers that have keys and values in the KV cache."""
        return self.layer_types.count("full_attention")

    @property
    def num_state_layers(self) -> int:
        return self.layer_types.count("linear_attention")

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a sequence's state in one layer: the convolution's window and the memory, in fp32."""
        heads, key_dim, value_dim = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        channels = 2 * self.linear_num_key_heads * key_dim + heads * value_dim
        return (self.linear_conv_kernel_dim - 1, channels), (heads, key_dim, value_dim)


class GatedAttention(QwenAttention):
    """Attention whose output is multiplied by the sigmoid of a gate. The first rotary_dim numbers of each head are rotated."""

    def __init__(self, config: QwenNextConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_proj = nn.Linear(config.hidden_size, 2 * config.num_attention_heads * config.head_dim, bias=False)
        self.q_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = ZeroCentredRMSNorm(config.head_dim, config.rms_norm_eps)
        self.rotary_dim = config.rotary_dim

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Attend) -> Hidden:
        heads = (-1, self.head_dim)
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # each [num_tokens, heads, head_dim]
        k = self.k_norm(self.k_proj(x).unflatten(-1, heads))
        v = self.v_proj(x).unflatten(-1, heads)
        q, k = (partial_rotary(x, cos, sin, self.rotary_dim) for x in (self.q_norm(q), k))
        out = attend(self.layer, q, k, v)
        return self.o_proj((out * sigmoid(gate)).flatten(1))


class GatedDeltaNet(nn.Module):
    """A layer with a state, with the projections of Qwen3.5."""

    def __init__(self, config: QwenNextConfig, layer: int) -> None:
        super().__init__()
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        key_size, self.value_size = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        channels = 2 * key_size + self.value_size
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_value_heads))
        self.norm = RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_size, config.hidden_size, bias=False)
        self.recurrence = DeltaRecurrence(config, layer)
        self.add_projections(config.hidden_size, channels)

    def add_projections(self, hidden_size: int, channels: int) -> None:
        self.in_proj_qkv = nn.Linear(hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, self.value_size, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, self.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, self.num_value_heads, bias=False)

    def project(self, x: Hidden) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return qkv [num_tokens, channels], z [num_tokens, value_size], b and a [num_tokens, value_heads]."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def forward(self, x: Hidden, attend: Recur) -> Hidden:
        weights = (self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
        return self.out_proj(self.recurrence(attend, *self.project(x), weights))


class GatedDeltaNetOfNext(GatedDeltaNet):
    """The projections of Qwen3-Next: the rows of each key head are its q, its k, and the v and z of its value heads."""

    def add_projections(self, hidden_size: int, channels: int) -> None:
        self.in_proj_qkvz = nn.Linear(hidden_size, channels + self.value_size, bias=False)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * self.num_value_heads, bias=False)

    def project(self, x: Hidden) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = self.value_size // self.num_key_heads
        qkvz = self.in_proj_qkvz(x).unflatten(-1, (self.num_key_heads, -1))  # [num_tokens, key_heads, rows of a head]
        q, k, v, z = qkvz.split([self.key_dim, self.key_dim, values, values], dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (self.num_key_heads, -1)).chunk(2, dim=-1)
        return torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=-1), z.flatten(1), b.flatten(1), a.flatten(1)


class QwenNextDecoderLayer(QwenMoeDecoderLayer):
    def __init__(self, config: QwenNextConfig, layer: int, delta_net: type[GatedDeltaNet] = GatedDeltaNet) -> None:
        super().__init__(config, layer)
        self.input_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.has_state = config.layer_types[layer] == "linear_attention"
        index = config.layer_types[:layer].count(config.layer_types[layer])  # the index among the layers of its kind
        if self.has_state:
            del self.self_attn
            self.linear_attn = delta_net(config, index)
        else:
            self.self_attn = GatedAttention(config, index)

    def forward(self, x: Hidden, cos: Angles, sin: Angles, attend: Recur) -> Hidden:  # type: ignore[override]
        normed = self.input_layernorm(x)
        x = x + (self.linear_attn(normed, attend) if self.has_state else self.self_attn(normed, cos, sin, attend))
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3_5ForCausalLM(QwenForCausalLM):
    """Qwen3.5's text model, with or without experts."""

    Config = QwenNextConfig
    weight_rules = replace(QwenMoeForCausalLM.weight_rules, ignored=("mtp.",))
    supports_cuda_graph = False  # Python code advances the state of each sequence
    delta_net: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def __init__(self, config: QwenNextConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(QwenNextDecoderLayer(config, layer, self.delta_net) for layer in layers)
        self.norm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rotary_dim, config.rope)


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    delta_net = GatedDeltaNetOfNext
