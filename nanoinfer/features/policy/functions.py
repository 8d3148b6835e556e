"""The engine's CPU kernels as differentiable operations of torch: linear layers, norms, rotations, attention.

In: the modules of a fused trace (fast/fuse.py). Out: modules with the same arguments. Forward is the kernel, so every number
has the engine's bits. The backward pass computes the module again in torch, as checkpointing does, for its gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.fast.cpu.layers import norm_call, rotate_call
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.cpu.program import Program, Slice
from nanoinfer.fast.fuse import FusedLinear, FusedRotation
from nanoinfer.models.layers import Angles, Heads, RMSNorm

Operation = Callable[..., Tensor]


class KernelFunction(torch.autograd.Function):
    """Computes kernel(*inputs), with the gradients of plain(*inputs) for the inputs and for the parameters that plain reads."""

    apply: ClassVar[Callable[..., Tensor]]  # torch does not type it

    @staticmethod
    def forward(ctx: Any, kernel: Operation, plain: Operation, num_inputs: int, *tensors: Tensor) -> Tensor:
        """tensors: the inputs, followed by the parameters."""
        ctx.plain, ctx.num_inputs = plain, num_inputs
        ctx.save_for_backward(*tensors)
        return kernel(*tensors[:num_inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        is_needed = ctx.needs_input_grad[3:]
        inputs, parameters = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(needed) for x, needed in zip(inputs, is_needed, strict=False)]
            out = ctx.plain(*inputs)
        of = [x for x, needed in zip([*inputs, *parameters], is_needed, strict=True) if needed]
        found = iter(torch.autograd.grad(out, of, gradients))
        return None, None, None, *(next(found) if needed else None for needed in is_needed)


class TrainedLinear(nn.Module):
    """FusedLinear by the engine's kernel, whose copy of the weights follows the parameters. others: as in KernelLinear."""

    def __init__(self, fused: FusedLinear, others: Sequence[str] = ()) -> None:
        super().__init__()
        self.plain, self._others = fused, tuple(others)
        self._packed = PackedLinear(fused)
        self._kernel = KernelLinear(self._packed, others)

    def forward(self, x: Float[Tensor, "rows in"], **others: Float[Tensor, "rows out"]) -> Float[Tensor, "rows out"]:
        for linear, start in self.plain.starts():  # at every call, because a fused optimizer changes parameters unnoticed
            for name, parameter in linear.named_parameters():
                self._packed.write(name, parameter.detach(), start)
        inputs = [x, *(others[name] for name in self._others)]
        parameters = [parameter for linear in self.plain.linears for parameter in linear.parameters()]
        return KernelFunction.apply(self._by_name(self._kernel), self._by_name(self.plain), len(inputs), *inputs, *parameters)

    def _by_name(self, module: nn.Module) -> Operation:
        return lambda x, *rest: module(x, **dict(zip(self._others, rest, strict=True)))


class TrainedModule(nn.Module):
    """A module whose forward pass is kernel(module, *inputs)."""

    def __init__(self, plain: nn.Module, kernel: Operation) -> None:
        super().__init__()
        self.plain, self._kernel = plain, partial(kernel, plain)

    def forward(self, *inputs: Tensor) -> Tensor:
        return KernelFunction.apply(self._kernel, self.plain, len(inputs), *inputs, *self.plain.parameters())


def normalize(norm: nn.LayerNorm | RMSNorm, x: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """Apply an RMSNorm, or a LayerNorm with weight and bias, over the last axis."""
    size, out = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    Program([norm_call(norm, Slice(0, 0, size), Slice(1, 0, size))])(len(x), (x.contiguous(), out))
    return out


def rotate(fused: FusedRotation, x: Heads, cos: Angles, sin: Angles) -> Heads:
    """Rotate heads by their position, after a norm over each head if there is one."""
    _, num_heads, size = x.shape
    out = x.clone(memory_format=torch.contiguous_format)  # the kernel works in place
    num_rotated, heads = fused.num_rotated, Slice(0, 0, num_heads * size)
    slices = heads, Slice(1, 0, num_rotated or size), Slice(2, 0, num_rotated or size), heads
    call = rotate_call(x.dtype, (num_heads, size), fused.norm, *slices, num_rotated=num_rotated or 0)
    Program([call])(len(x), (out, cos.contiguous(), sin.contiguous()))
    return out


class TrainedAttention:
    """The attention of packed sequences. attend: the Attend of a backend's step. lengths: the sequences' lengths, in order."""

    def __init__(self, attend: Attend, lengths: Sequence[int]) -> None:
        self._attend, self._lengths = attend, list(lengths)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return KernelFunction.apply(partial(self._attend, layer), self.plain, 3, q, k, v)

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention in plain torch, one sequence after the other."""
        split = (x.transpose(0, 1).split(self._lengths, dim=1) for x in (q, k, v))  # [heads, num_tokens, head_dim]
        outs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in zip(*split, strict=True)
        ]
        return torch.cat(outs, dim=1).transpose(0, 1)
