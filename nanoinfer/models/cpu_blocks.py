"""Transformer blocks on a CPU: fewer and larger products, which also apply the activation and add the residual.

In: a block of a model file, which is taken apart. Out: a block with the same arguments and the same result. q, k and v are one
product, and cpu_linear.py computes every product.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.models.cpu_linear import LinearOptimizer
from nanoinfer.models.cpu_program import Array, LayerSteps
from nanoinfer.models.gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from nanoinfer.models.layers import RMSNorm, SwiGLU, apply_rotary
from nanoinfer.models.parallel_layers import AllReduced
from nanoinfer.models.qwen import QwenAttention, QwenDecoderLayer


class CPUGPT2Block(nn.Module):
    """GPT2Block on a CPU: fused activation and residual additions."""

    parts = (GPT2Attention, GPT2MLP, nn.LayerNorm, nn.Linear, AllReduced)

    def __init__(self, block: GPT2Block, linears: LinearOptimizer) -> None:
        super().__init__()
        self.layer = block.attn.layer
        self.heads = (3, block.attn.num_heads, block.attn.head_dim)
        self.ln_1, self.ln_2 = block.ln_1, block.ln_2
        self.qkv_proj = linears.take(block.attn, "c_attn")
        self.out_proj = linears.take(block.attn, "c_proj", adds_residual=True)
        self.up_proj = linears.take(block.mlp, "c_fc", activation="gelu_tanh")
        self.down_proj = linears.take(block.mlp, "c_proj", adds_residual=True)

    def forward(self, x: Float[Tensor, "num_tokens hidden"], attend: Attend) -> Float[Tensor, "num_tokens hidden"]:
        x = self._attention(x, attend)
        return self.down_proj(self.up_proj(self.ln_2(x)), x)

    def _attention(self, x: Tensor, attend: Attend) -> Tensor:
        """x + attention. A method, so that q, k and v are freed before the MLP."""
        q, k, v = self.qkv_proj(self.ln_1(x)).unflatten(-1, self.heads).unbind(1)
        return self.out_proj(attend(self.layer, q, k, v).flatten(1), x)

    def describe(self, steps: LayerSteps) -> None:
        """`forward` as steps of a program."""
        _, num_heads, head_dim = self.heads
        steps.norm(self.ln_1, Array.X, Array.NORMED)
        steps.linear(self.qkv_proj, Array.NORMED, Array.QKV)
        steps.attend(self.layer, num_heads, num_heads, head_dim)
        steps.linear(self.out_proj, Array.ATTENDED, Array.X)
        steps.norm(self.ln_2, Array.X, Array.NORMED)
        steps.linear(self.up_proj, Array.NORMED, Array.HIDDEN)
        steps.linear(self.down_proj, Array.HIDDEN, Array.X)


class CPUQwenDecoderLayer(nn.Module):
    """QwenDecoderLayer on a CPU: one product for q, k and v, fused activation and residual additions.

    q and k are normalised and rotated as one tensor, whose heads have a weight each. That halves the number of operators.
    """

    parts = (QwenAttention, SwiGLU, RMSNorm, nn.Linear, AllReduced)

    def __init__(self, layer: QwenDecoderLayer, linears: LinearOptimizer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = attention.layer
        self.head_dim = attention.head_dim
        self.num_heads, self.num_kv_heads = (
            part.out_features // self.head_dim for part in (attention.q_proj, attention.k_proj)
        )
        self.qk_norm = attention.qk_norm
        if self.qk_norm:
            self.norm = RMSNorm(self.head_dim, attention.q_norm.eps)
            q_weight, k_weight = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            weights = [q_weight] * self.num_heads + [k_weight] * self.num_kv_heads
            self.norm.weight = nn.Parameter(torch.stack(weights), requires_grad=False)
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv_proj = linears.take(attention, "q_proj", "k_proj", "v_proj")
        self.o_proj = linears.take(attention, "o_proj", adds_residual=True)
        self.gate_proj = linears.take(mlp, "gate_proj", activation="silu")
        self.up_proj = linears.take(mlp, "up_proj")
        self.down_proj = linears.take(mlp, "down_proj", adds_residual=True)

    def forward(
        self,
        x: Float[Tensor, "num_tokens hidden"],
        cos: Float[Tensor, "num_tokens 1 head_dim"],
        sin: Float[Tensor, "num_tokens 1 head_dim"],
        attend: Attend,
    ) -> Float[Tensor, "num_tokens hidden"]:
        x = self._attention(x, cos, sin, attend)
        normed = self.post_attention_layernorm(x)
        return self.down_proj(self.gate_proj(normed) * self.up_proj(normed), x)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x + attention. A method, so that q, k and v are freed before the MLP."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)  # [num_tokens, heads, head_dim]
        if self.qk_norm:
            qk = self.norm(qk)
        q, k = apply_rotary(qk, cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
        return self.o_proj(attend(self.layer, q, k, v).flatten(1), x)

    def describe(self, steps: LayerSteps) -> None:
        """`forward` as steps of a program."""
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        steps.norm(self.input_layernorm, Array.X, Array.NORMED)
        steps.linear(self.qkv_proj, Array.NORMED, Array.QKV)
        steps.rotate(self.norm if self.qk_norm else None, *heads)
        steps.attend(self.layer, *heads)
        steps.linear(self.o_proj, Array.ATTENDED, Array.X)
        steps.norm(self.post_attention_layernorm, Array.X, Array.NORMED)
        steps.linear(self.gate_proj, Array.NORMED, Array.HIDDEN)
        steps.linear(self.up_proj, Array.NORMED, Array.HIDDEN, factor=Array.HIDDEN)
        steps.linear(self.down_proj, Array.HIDDEN, Array.X)


class CPUSwiGLU(nn.Module):
    """SwiGLU on a CPU, of an expert: fused activation. In torch's own silu the last elements of a tensor have other bits."""

    parts = (nn.Linear,)

    def __init__(self, mlp: SwiGLU, linears: LinearOptimizer) -> None:
        super().__init__()
        self.gate_proj = linears.take(mlp, "gate_proj", activation="silu")
        self.up_proj = linears.take(mlp, "up_proj")
        self.down_proj = linears.take(mlp, "down_proj")

    def forward(self, x: Float[Tensor, "num_tokens hidden"]) -> Float[Tensor, "num_tokens hidden"]:
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


# block of a model file -> its form on a CPU, built as form(block, linear_optimizer)
CPU_BLOCKS: dict[type[nn.Module], Any] = {
    GPT2Block: CPUGPT2Block,
    QwenDecoderLayer: CPUQwenDecoderLayer,
    SwiGLU: CPUSwiGLU,
}
