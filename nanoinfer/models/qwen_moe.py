"""Qwen2-MoE and Qwen3-MoE: the layers of qwen.py, whose MLP is a mixture of experts in some or all layers.

    num_experts             the number of MLPs of a layer. A router chooses num_experts_per_tok for each token
    norm_topk_prob          the weights of the chosen experts sum to 1
    shared_expert           Qwen2-MoE: a further MLP, with a gate of its own, for every token
    decoder_sparse_step     every decoder_sparse_step-th layer has experts, except mlp_only_layers

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538, and the papers of qwen.py. The names are the checkpoints'.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from nanoinfer.errors import CheckpointError, UnsupportedError, shown
from nanoinfer.models.layers import Hidden, SwiGLU, sigmoid
from nanoinfer.models.qwen import QwenConfig, QwenDecoderLayer, QwenForCausalLM, shared_fields
from nanoinfer.models.registry import ConfigJson


@dataclass(frozen=True, kw_only=True)
class QwenMoeConfig(QwenConfig):
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int | None
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: ConfigJson) -> "QwenMoeConfig":
        """Read config.json. Raises: the errors of QwenConfig.from_hf."""
        is_qwen3 = config["model_type"] == "qwen3_moe"
        slides = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
        if slides or "sliding_attention" in (config.get("layer_types") or ()):
            raise UnsupportedError(
                f"sliding-window attention (sliding_window={shown(config.get('sliding_window'))}) is not supported for these "
                "mixtures of experts; only checkpoints with use_sliding_window=false, and no such layer_types, are"
            )
        attention_bias = is_qwen3 and config.get("attention_bias", False)
        return cls(
            **shared_fields(config),
            **expert_fields(config),
            qkv_bias=attention_bias if is_qwen3 else config.get("qkv_bias", True),
            o_bias=attention_bias,
            qk_norm=is_qwen3,
            moe_intermediate_size=config["moe_intermediate_size"],
            shared_expert_intermediate_size=None if is_qwen3 else config["shared_expert_intermediate_size"],
            norm_topk_prob=config.get("norm_topk_prob", False),
            decoder_sparse_step=config.get("decoder_sparse_step", 1),
            mlp_only_layers=tuple(config.get("mlp_only_layers") or ()),
        )

    @property
    def sparse_layers(self) -> list[int]:
        """The indices of the layers that have experts."""
        layers = range(self.decoder_sparse_step - 1, self.num_hidden_layers, self.decoder_sparse_step)
        return [layer for layer in layers if layer not in self.mlp_only_layers]


def expert_fields(config: ConfigJson) -> dict[str, Any]:
    """Return the number of experts, and how many a token passes. Raises: CheckpointError if the second exceeds the first."""
    num_experts = config.get("num_experts") or config["num_local_experts"]  # newer transformers has the second name
    if config.get("num_local_experts", num_experts) != num_experts:
        both = f"{shown(num_experts)} and {shown(config['num_local_experts'])}"
        raise CheckpointError(f"num_experts and num_local_experts must be equal, got {both}; remove the wrong one")
    num_chosen = config["num_experts_per_tok"]
    if num_chosen > num_experts:
        raise CheckpointError(f"num_experts_per_tok must be <= {shown(num_experts)} (num_experts), got {shown(num_chosen)}")
    return {"num_experts": num_experts, "num_experts_per_tok": num_chosen}


@wrap_torch_function(lambda scores, k, is_normed: (scores,))  # a tracer records a single operation
def route(
    scores: Float[Tensor, "num_tokens num_experts"], k: int, is_normed: bool
) -> tuple[Float[Tensor, "num_tokens k"], Int[Tensor, "num_tokens k"]]:
    """Choose the k experts of each token with the largest share of a softmax. Returns their weights, in fp32, and numbers.

    is_normed: whether the weights of a token are divided by their sum.
    """
    weights, chosen = scores.float().softmax(dim=-1).topk(k, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if is_normed else weights), chosen


class Experts(nn.ModuleList):
    """The MLPs among which a router chooses."""

    supports_cuda_graph = False  # the host must know how many tokens each expert has. fast/cuda/experts.py need not know it

    def weighted_sum(
        self, x: Hidden, weights: Float[Tensor, "num_tokens k"], chosen: Int[Tensor, "num_tokens k"]
    ) -> Float[Tensor, "num_tokens hidden"]:
        """Return the weighted sum of the chosen experts, in fp32. Each expert computes all of its tokens in one product.

        Only the weights of chosen experts are read. A token's experts are added in the order of their numbers, so its bits do
        not depend on the other tokens. The host waits for a GPU once.
        """
        out = torch.zeros_like(x, dtype=torch.float32)
        numbers = chosen.flatten()
        by_expert = numbers.argsort(stable=True)  # indices into `numbers`
        counts = numbers.new_zeros(len(self)).index_add_(0, numbers, torch.ones_like(numbers))
        end = 0
        for expert, count in zip(self, counts.tolist(), strict=True):
            if count:
                places, end = by_expert[end : end + count], end + count
                tokens = places // chosen.shape[1]
                out.index_add_(0, tokens, weights.flatten()[places].unsqueeze(1) * expert(x[tokens]))
        return out


class MixtureOfExperts(nn.Module):
    """Computes the sum of weight_e * expert_e(x) over the experts that the router chooses for x, and any shared expert."""

    def __init__(self, config: QwenMoeConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)  # the router
        self.experts = Experts(SwiGLU(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.has_shared_expert = config.shared_expert_intermediate_size is not None
        if config.shared_expert_intermediate_size is not None:
            self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        weights, chosen = route(self.gate(x), self.num_experts_per_tok, self.norm_topk_prob)
        out = self.experts.weighted_sum(x, weights, chosen)
        if self.has_shared_expert:
            out += sigmoid(self.shared_expert_gate(x).float()) * self.shared_expert(x)
        return out.to(x.dtype)


class QwenMoeDecoderLayer(QwenDecoderLayer):
    def __init__(self, config: QwenMoeConfig, layer: int) -> None:
        super().__init__(config, layer)
        if layer in config.sparse_layers:
            self.mlp = MixtureOfExperts(config)  # type: ignore[assignment]  # in the place of the dense one


class QwenMoeForCausalLM(QwenForCausalLM):
    Config = QwenMoeConfig
    weight_rules = replace(QwenForCausalLM.weight_rules, fused_experts="halves")

    def __init__(self, config: QwenMoeConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(QwenMoeDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
