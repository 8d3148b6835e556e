"""The engine's CPU kernels as operations of torch that have gradients: linear layers, norms, rotations, attention.

In: the modules of a fused trace (fast/fuse.py). Out: modules with the same arguments. Forward is the kernel, so every number
has the bits of the engine. Backward computes the layer again in plain torch, as checkpointing does, and returns its gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.fast.cpu.layers import norm_call, rotate_call
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.cpu.program import Program, Slice
from nanoinfer.fast.fuse import ACTIVATIONS, FusedLinear, FusedRotation
from nanoinfer.models.layers import RMSNorm

Operation = Callable[..., Tensor]


class KernelFunction(torch.autograd.Function):
    """kernel(*tensors), with the gradients of plain(*tensors). Both take the same tensors, some of which may be None."""

    @staticmethod
    def forward(ctx: Any, kernel: Operation, plain: Operation, *tensors: Tensor | None) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        with torch.enable_grad():
            tensors = [None if x is None else x.detach().requires_grad_(is_needed) for x, is_needed in given]
            out = ctx.plain(*tensors)
        needed = [x for x in tensors if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, needed, gradients))
        return None, None, *(next(found) if x is not None and x.requires_grad else None for x in tensors)


class TrainedLinear(nn.Module):
    """FusedLinear by the engine's kernel, whose copy of the weights follows the parameters. others: of a KernelLinear."""

    def __init__(self, fused: FusedLinear, others: Sequence[str] = ()) -> None:
        super().__init__()
        self._fused, self._others = fused, tuple(others)
        self._packed = PackedLinear(fused)
        self._kernel = KernelLinear(self._packed, others)

    def forward(self, x: Float[Tensor, "rows in"], **others: Float[Tensor, "rows out"]) -> Float[Tensor, "rows out"]:
        for linear, start in self._fused.starts():  # always: a fused optimizer changes numbers without a trace
            for name, parameter in linear.named_parameters():
                self._packed.write(name, parameter.detach(), start)
        parameters = [getattr(linear, name) for linear in self._fused.linears for name in ("weight", "bias")]
        return KernelFunction.apply(self._compute, self.plain, x, *(others[name] for name in self._others), *parameters)

    def _compute(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self._kernel(x, **dict(zip(self._others, rest, strict=False)))

    def plain(self, x: Tensor, *rest: Tensor) -> Tensor:
        """The layer in plain torch, of x, the others, and the weight and bias of each linear layer."""
        others, parameters = rest[: len(self._others)], rest[len(self._others) :]
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        out = torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], dim=-1)
        out = out if self._fused.activation is None else ACTIVATIONS[self._fused.activation](out)
        by_name = dict(zip(self._others, others, strict=True))
        out = by_name["factor"] * out if "factor" in by_name else out
        return by_name["residual"] + out if "residual" in by_name else out


class TrainedNorm(nn.Module):
    """An RMSNorm, or a LayerNorm with weight and bias, over the last axis."""

    def __init__(self, norm: nn.LayerNorm | RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
        return KernelFunction.apply(self._compute, self.plain, x, *self.norm.parameters())

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The norm in plain torch."""
        if isinstance(self.norm, RMSNorm):
            return F.rms_norm(x, weight.shape, weight, self.norm.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.norm.eps)

    def _compute(self, x: Tensor, *parameters: Tensor) -> Tensor:
        size, out = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
        Program([norm_call(self.norm, Slice(0, 0, size), Slice(1, 0, size))])(len(x), (x.contiguous(), out))
        return out


class TrainedRotation(nn.Module):
    """FusedRotation: the rotation of heads by their position, after a norm over each head if there is one."""

    def __init__(self, fused: FusedRotation) -> None:
        super().__init__()
        self.fused = fused

    def forward(
        self,
        x: Float[Tensor, "num_tokens heads head_dim"],
        cos: Float[Tensor, "num_tokens 1 head_dim"],
        sin: Float[Tensor, "num_tokens 1 head_dim"],
    ) -> Float[Tensor, "num_tokens heads head_dim"]:
        return KernelFunction.apply(self._compute, self.plain, x, cos, sin, *self.fused.parameters())

    def plain(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None) -> Tensor:
        """The norm and the rotation in plain torch."""
        if weight is not None and self.fused.norm is not None:
            x = F.rms_norm(x, weight.shape, weight, self.fused.norm.eps)
        return FusedRotation(None, self.fused.num_rotated)(x, cos, sin)

    def _compute(self, x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
        num_heads, size = x.shape[1:]
        out = x.clone(memory_format=torch.contiguous_format)  # the kernel works in place
        num_rotated, heads = self.fused.num_rotated, Slice(0, 0, num_heads * size)
        slices = heads, Slice(1, 0, num_rotated or size), Slice(2, 0, num_rotated or size), heads
        call = rotate_call(x.dtype, size, [num_heads, 0], [self.fused.norm, None], *slices, num_rotated=num_rotated)
        Program([call])(len(x), (out, cos.contiguous(), sin.contiguous()))
        return out


class TrainedAttention:
    """The attention of packed sequences. attend: of a backend's step. lengths: of the sequences, in their order."""

    def __init__(self, attend: Attend, lengths: Sequence[int]) -> None:
        self._attend, self._lengths = attend, list(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, k, v)

        return KernelFunction.apply(kernel, self.plain, q, k, v)

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention in plain torch, one sequence after the other."""
        parts = (x.transpose(0, 1).split(self._lengths, dim=1) for x in (q, k, v))  # [heads, num_tokens, head_dim]
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outs, dim=1).transpose(0, 1)
