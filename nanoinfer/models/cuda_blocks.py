"""Transformer blocks on a GPU: fewer and larger products, and one Triton kernel for everything between two of them.

In: a block of a model file. Out: a block with the same arguments and the same result, which may overwrite its input x.

GPT-2 has no form here. Its linear layers have a bias, so the product cannot add the residual, and torch's own operators compute
LayerNorm and GELU in one kernel each.
"""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.models.fused_kernels import rms_norm, rotate, silu_and_mul
from nanoinfer.models.layers import RMSNorm, SwiGLU, merge_linears
from nanoinfer.models.qwen import QwenAttention, QwenDecoderLayer


class FusedRMSNorm(nn.Module):
    """RMSNorm on a GPU: one kernel."""

    parts = ()

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return rms_norm(x, self.weight, self.eps)


class CUDAQwenDecoderLayer(nn.Module):
    """QwenDecoderLayer on a GPU: one product for q, k and v, one for gate and up. It adds to x in place."""

    parts = (QwenAttention, SwiGLU, RMSNorm, nn.Linear)

    def __init__(self, layer: QwenDecoderLayer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = attention.layer
        self.head_dim = attention.head_dim
        self.heads_per_projection = [
            part.out_features // self.head_dim for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        self.q_norm: RMSNorm | None = attention.q_norm if attention.qk_norm else None
        self.k_norm: RMSNorm | None = attention.k_norm if attention.qk_norm else None
        self.input_layernorm = FusedRMSNorm(layer.input_layernorm)
        self.post_attention_layernorm = FusedRMSNorm(layer.post_attention_layernorm)
        self.qkv_proj = merge_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.gate_up_proj = merge_linears(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden"],
        cos: Float[Tensor, "num_tokens 1 head_dim"],
        sin: Float[Tensor, "num_tokens 1 head_dim"],
        attend: Attend,
    ) -> Float[Tensor, "num_tokens hidden"]:
        x = self._attention(x, cos, sin, attend)
        gate_up = self.gate_up_proj(self.post_attention_layernorm(x))  # [num_tokens, 2 * intermediate]
        return add_product(x, silu_and_mul(gate_up), self.down_proj)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x + attention. A method, so that q, k and v are freed before the MLP."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads_per_projection, dim=1)  # [num_tokens, num_heads or num_kv_heads, head_dim]
        q, k = _norm_and_rotate(q, self.q_norm, cos, sin), _norm_and_rotate(k, self.k_norm, cos, sin)
        return add_product(x, attend(self.layer, q, k, v).flatten(1), self.o_proj)


def _norm_and_rotate(x: Tensor, norm: RMSNorm | None, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos, sin) if norm is None else rotate(x, cos, sin, norm.weight, norm.eps)


def add_product(
    residual: Float[Tensor, "num_tokens out"], x: Float[Tensor, "num_tokens in"], linear: nn.Linear
) -> Float[Tensor, "num_tokens out"]:
    """Return residual + linear(x). Without a bias, the product's own kernel adds it to the residual in place.

    No kernel then reads the residual for the sum alone. With a bias there are three terms, which are left to torch.
    """
    if linear.bias is None:
        return residual.addmm_(x, linear.weight.t())
    return residual + F.linear(x, linear.weight, linear.bias)


# module of a model file -> its form on a GPU, built as form(module)
CUDA_BLOCKS: dict[type[nn.Module], Any] = {QwenDecoderLayer: CUDAQwenDecoderLayer, RMSNorm: FusedRMSNorm}
