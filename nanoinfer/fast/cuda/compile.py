"""Compile a trace for a GPU: fewer and larger products, and one Triton kernel for everything between two of them.

In: a Trace. Out: the same trace, whose graph then calls the modules of this file. A model without an operation that a
kernel computes faster stays as it is, such as GPT-2: its linear layers have a bias, so the product cannot add the residual, and
torch's own operators compute LayerNorm and GELU in one kernel each.
"""

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from nanoinfer.attention.base import Attend
from nanoinfer.attention.dense import Keys, Queries, with_whole_heads
from nanoinfer.attention.triton import paged_attention, rotate_and_store
from nanoinfer.fast.cuda import decode_kernels
from nanoinfer.fast.cuda.decode_kernels import decode_attention, decode_linear
from nanoinfer.fast.cuda.experts import KernelExperts
from nanoinfer.fast.cuda.fused_kernels import angles, rms_norm, silu_and_mul
from nanoinfer.fast.cuda.invariant import invariant_linear
from nanoinfer.fast.cuda.linear_kernel import Arrivals, few_rows_linear, supports
from nanoinfer.fast.fuse import FusedLinear, FusedRotation, fuse
from nanoinfer.fast.trace import Trace, has_hooks
from nanoinfer.features.hybrid.groups import GroupedAttend
from nanoinfer.models.layers import Angles, Heads, Ids, RMSNorm, RotaryEmbedding, ZeroCentredRMSNorm


class KernelRMSNorm(nn.Module):
    """RMSNorm in one kernel, if its weight has the dtype of x."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        norm = self.norm
        return rms_norm(x, norm.weight, norm.eps) if x.dtype is norm.weight.dtype else norm(x)


class KernelAngles(nn.Module):
    """RotaryEmbedding in one kernel."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Ids, dtype: torch.dtype) -> tuple[Angles, Angles]:
        return angles(positions, self.rotary.inv_freq, self.rotary.attention_factor, dtype)


class KernelRotation(nn.Module):
    """FusedRotation in one kernel, if each token has an angle for each number of a head, in the dtype of x, contiguous."""

    def __init__(self, fused: FusedRotation) -> None:
        super().__init__()
        self.fused = fused

    @property
    def norm(self) -> tuple[Tensor | None, float]:
        return (None, 0.0) if self.fused.norm is None else (self.fused.norm.weight, self.fused.norm.eps)

    def supports(self, x: Tensor, cos: Angles, sin: Angles) -> bool:
        read = [cos, sin, *(() if self.fused.norm is None else (self.fused.norm.weight,))]
        is_fitting = x.ndim == 3 and cos.shape == sin.shape == (len(x), 1, x.shape[-1])
        return is_fitting and all(tensor.dtype is x.dtype and tensor.is_contiguous() for tensor in read)

    def forward(self, x: Heads, cos: Angles, sin: Angles) -> Heads:
        if self.supports(x, cos, sin):
            return rotate_and_store(with_whole_heads(x), (cos, sin, *self.norm, None, 0.0))
        return cast(Tensor, self.fused(x, cos, sin))


class RotatedAttention(nn.Module):
    """Rotates queries and keys, and attends. Where Triton's kernels attend, one of them rotates and stores, or does it all."""

    def __init__(self, rotation: KernelRotation, k_rotation: KernelRotation) -> None:
        super().__init__()
        self.rotation, self.k_rotation, self.arrivals = rotation, k_rotation, Arrivals()

    def forward(
        self, attend: Attend, layer: int, q: Queries, k: Keys, v: Tensor, cos: Angles, sin: Angles, **options: Any
    ) -> Queries:
        step, place = attend, layer
        if isinstance(attend, GroupedAttend):
            group, place = attend.places[layer]
            step = attend.steps[group]
        is_supported = self.rotation.supports(q, cos, sin) and self.k_rotation.supports(k, cos, sin) and k.shape == v.shape
        if is_supported and isinstance(step, partial) and step.func is paged_attention:
            rotation = cos, sin, *self.rotation.norm, *self.k_rotation.norm
            cache, metadata = step.args
            if not step.keywords and decode_kernels.supports_attention(q, metadata):
                return decode_attention(cache, metadata, place, q, k, v, rotation, self.arrivals, **options)
            return cast(Tensor, step(place, q, k, v, rotation=rotation, **options))
        return attend(layer, self.rotation(q, cos, sin), self.k_rotation(k, cos, sin), v, **options)


class FewRowsLinear(nn.Module):
    """Computes a linear layer. gated: silu(gate(x)) * up(x), where the layer holds both. norm: of x, before the product."""

    def __init__(self, linear: nn.Linear, *, gated: bool = False) -> None:
        super().__init__()
        self.linear, self.gated = linear, gated
        self.norm: KernelRMSNorm | None = None
        self.is_invariant = False

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        linear, norm = self.linear, None if self.norm is None else (self.norm.norm.weight, self.norm.norm.eps)
        if self.is_invariant:
            x = x if self.norm is None else self.norm(x)
            return invariant_linear(x, linear.weight, linear.bias, gated=self.gated)
        if decode_kernels.supports(x, linear, norm):
            return decode_linear(x, linear.weight, linear.bias, norm=norm, gated=self.gated)
        x = x if self.norm is None else self.norm(x)
        if supports(x, linear):
            return few_rows_linear(x, linear.weight, linear.bias, gated=self.gated)
        return silu_and_mul(linear(x)) if self.gated else cast(Tensor, linear(x))


class AddedLinear(nn.Module):
    """Computes residual + linear(x) without a bias: addmm adds the product to the residual, in place if in_place."""

    def __init__(self, linear: nn.Linear, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place, self.arrivals = linear, in_place, Arrivals()
        self.is_invariant = False

    def forward(self, x: Float[Tensor, "*rows in"], residual: Float[Tensor, "*rows_or_one out"]) -> Float[Tensor, "*rows out"]:
        linear, in_place = self.linear, self.in_place
        if residual.shape != (len(x), linear.out_features) or residual.dtype is not x.dtype or x.ndim != 2:
            return residual + cast(Tensor, linear(x))
        if residual.is_contiguous():
            if self.is_invariant:
                return invariant_linear(
                    x, linear.weight, None, residual=residual, in_place=in_place, arrivals=self.arrivals
                )  # fmt: skip
            if decode_kernels.supports(x, linear):
                return decode_linear(x, linear.weight, None, residual=residual, in_place=in_place)
            if supports(x, linear):
                return few_rows_linear(
                    x, linear.weight, None, residual=residual, in_place=in_place, arrivals=self.arrivals
                )  # fmt: skip
        add = torch.Tensor.addmm_ if in_place else torch.addmm
        return add(residual, x, linear.weight.t())


# A linear layer -> the layers with which it was merged, and the layer that computes them.
Merges = dict[nn.Linear, tuple[tuple[nn.Linear, ...], nn.Linear]]


def compile_for_cuda(trace: Trace, merges: Merges, *, is_invariant: bool = False) -> int:
    """Compile a trace in place. Returns the number of operations that this package's kernels or larger products compute.

    Args:
        merges: what the model's traces have merged so far, to which this trace adds.
        is_invariant: whether the rows of products have the same bits in any number of rows (invariant.py).
    """
    fuse(trace)
    num_faster = 0
    for node in list(trace.graph.nodes):
        module = trace.module(node)
        faster: nn.Module | None = None
        if isinstance(module, FusedRotation) and type(module.norm) is not ZeroCentredRMSNorm and module.num_rotated is None:
            faster = KernelRotation(module)
        elif type(module) is RMSNorm and module.weight.ndim == 1 and not has_hooks(module):
            faster = KernelRMSNorm(module)
        elif isinstance(module, RotaryEmbedding) and type(module).forward is RotaryEmbedding.forward and not has_hooks(module):
            faster = KernelAngles(module)
        elif isinstance(module, FusedLinear):
            faster = _faster_linear(trace, node, module, merges)
        elif isinstance(module, KernelExperts):
            num_faster += 1
        elif node.target == "__call__" and len(node.args) == 5:
            _rotate_in_attention(trace, node, *node.args)
        if faster is not None:
            node.target = trace.name("kernel", faster)
            num_faster += 1
            if isinstance(faster, FewRowsLinear | AddedLinear):
                faster.is_invariant = is_invariant
    _move_norms_into_products(trace)
    _add_adapters(trace, merges)
    return num_faster


def _move_norms_into_products(trace: Trace) -> None:
    """Let a product compute the norm before it, if nothing else reads the norm, and the norm's input stays until then."""
    written: set[fx.Node] = set()  # the residuals that the products so far have overwritten
    for node in list(trace.graph.nodes):
        module, x = trace.module(node), node.args[0] if node.args else None
        if isinstance(module, AddedLinear) and module.in_place:
            written.add(node.kwargs["residual"])
        if isinstance(module, FewRowsLinear) and isinstance(x, fx.Node) and len(x.users) == 1:
            norm = trace.module(x)
            if isinstance(norm, KernelRMSNorm) and x.args[0] not in written:
                module.norm, node.args = norm, x.args
                trace.graph.erase_node(x)


def _add_adapters(trace: Trace, merges: Merges) -> None:
    """Add the adapters of requests, which are hooks of layers, to the products of these layers."""
    layers_of = {merged: linears for linears, merged in merges.values()}
    for node in trace.graph.nodes:
        product = trace.module(node)
        if not isinstance(product, FewRowsLinear | AddedLinear):
            continue
        linears = layers_of.get(product.linear, (product.linear,))
        if any(linear._forward_hooks for linear in linears):
            from nanoinfer.fast.cuda.lora import AdaptedProduct, without_hooks

            product.linear, norm, gated = without_hooks(product.linear), None, False
            if isinstance(product, FewRowsLinear):
                (norm, gated), product.norm, product.gated = (product.norm, product.gated), None, False
            node.target = trace.name("adapted", AdaptedProduct(product, linears, norm, gated=gated))


def _rotate_in_attention(trace: Trace, node: fx.Node, attend: Any, layer: Any, q: Any, k: Any, v: Any) -> None:
    """Move rotations of q and k that only the attention reads into it."""
    rotations: list[Any] = [trace.module(x) if isinstance(x, fx.Node) and len(x.users) == 1 else None for x in (q, k)]
    are_kernels = all(isinstance(module, KernelRotation) for module in rotations)
    if are_kernels and len({q, k, v}) == 3 and q.args[1:] == k.args[1:]:
        node.op, node.target = "call_module", trace.name("attention", RotatedAttention(*rotations))
        node.args = attend, layer, q.args[0], k.args[0], v, *q.args[1:]
        trace.graph.erase_node(q)
        trace.graph.erase_node(k)


def _faster_linear(trace: Trace, node: fx.Node, module: FusedLinear, merges: Merges) -> nn.Module | None:
    """Return the module that computes a linear layer with others, or with the addition after it. None: it stays as it is."""
    factor, residual = node.kwargs.get("factor"), node.kwargs.get("residual")
    gate = trace.module(factor) if isinstance(factor, fx.Node) else None
    if isinstance(factor, fx.Node) and isinstance(gate, FusedLinear) and not residual and _is_gate(factor, gate, node, module):
        gate_up = _merged(trace, FusedLinear(*gate.linears, *module.linears), merges)
        if gate_up is not None:
            node.kwargs = {}
            trace.graph.erase_node(factor)
            return FewRowsLinear(gate_up, gated=True)
    if isinstance(residual, fx.Node) and factor is None and module.activation is None and module.linears[0].bias is None:
        return AddedLinear(module.linears[0], in_place=_is_last_use(trace, residual, node))
    merged = _merged(trace, module, merges) if len(module.linears) > 1 and not node.kwargs else None
    return None if merged is None else FewRowsLinear(merged)


def _merged(trace: Trace, fused: FusedLinear, merges: Merges) -> nn.Linear | None:
    """Return a layer that computes the layers of `fused`, whose weights become views of its weight.

    None: a layer has to keep its own weight, because it is in another merge, or because the model reads the weight itself.
    """
    linears, read = fused.linears, {value for value in trace.owned.values() if isinstance(value, nn.Parameter)}
    is_new = len(set(linears)) == len(linears) and not any(linear in merges for linear in linears)
    if is_new and read.isdisjoint(weight for linear in linears for weight in linear.parameters()):
        merges |= dict.fromkeys(linears, (linears, fused.merged()))
    together, merged = merges.get(linears[0], ((), None))
    return merged if together == linears else None


def _is_gate(factor: fx.Node, gate: FusedLinear, node: fx.Node, module: FusedLinear) -> bool:
    """Whether the node is silu(gate(x)) * up(x), and nothing else reads the gate."""
    is_alike = len({linear.bias is None for linear in (*gate.linears, *module.linears)}) == 1
    is_of_same_input = factor.args == node.args and not factor.kwargs and len(factor.users) == 1
    return gate.activation == "silu" and module.activation is None and is_alike and is_of_same_input


def _is_last_use(trace: Trace, residual: fx.Node, node: fx.Node) -> bool:
    """Whether the product may overwrite the residual, which another operation of the graph made and nothing reads later."""
    is_new = isinstance(trace.module(residual), AddedLinear | nn.Embedding)
    order = list(trace.graph.nodes)
    has_views = any(user is not node and _may_view(trace, user) for user in residual.users)
    return is_new and not has_views and residual not in node.args and max(map(order.index, residual.users)) == order.index(node)


def _may_view(trace: Trace, node: fx.Node) -> bool:
    """Whether an operation's result may share the memory of its input, which may then be read later."""
    if node.target is getattr:
        return node.args[1] not in ("dtype", "device", "shape")
    computing = FusedLinear, FewRowsLinear, AddedLinear, KernelRMSNorm, RMSNorm, nn.LayerNorm
    return not isinstance(trace.module(node), computing)
