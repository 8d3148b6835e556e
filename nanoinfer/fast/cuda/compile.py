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
from nanoinfer.attention.triton import Rotation, paged_attention, rotate_and_store
from nanoinfer.fast.cuda import decode_kernels
from nanoinfer.fast.cuda.decode_kernels import decode_attention, decode_linear
from nanoinfer.fast.cuda.experts import fuse_experts
from nanoinfer.fast.cuda.fused_kernels import Norm, angles, gate_and_mul, rms_norm
from nanoinfer.fast.cuda.invariant import invariant_linear
from nanoinfer.fast.cuda.linear_kernel import Arrivals, few_rows_linear, supports
from nanoinfer.fast.cuda.quantized import IntegerLayers, IntegerLinear
from nanoinfer.fast.fuse import ADD, MULTIPLY, RMS_NORMS, FusedLinear, FusedRotation, fuse
from nanoinfer.fast.trace import Trace, has_hooks
from nanoinfer.features.hybrid.groups import GroupedAttend
from nanoinfer.models.layers import Angles, Heads, Ids, RMSNorm, RotaryEmbedding, ZeroCentredRMSNorm


def norm_of(norm: RMSNorm) -> Norm:
    """Return what kernels compute as this norm, which is of a class in RMS_NORMS."""
    return Norm(norm.weight, norm.eps, type(norm) is ZeroCentredRMSNorm)


class KernelRMSNorm(nn.Module):
    """A norm of RMS_NORMS, and its sum with a residual if any, in one kernel if all have the dtype of x."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(
        self, x: Float[Tensor, "*rows size"], residual: Float[Tensor, "*rows_or_one size"] | None = None
    ) -> Float[Tensor, "*rows size"]:
        is_alike = x.dtype is self.norm.weight.dtype
        if residual is not None and not (is_alike and residual.dtype is x.dtype and residual.shape == x.shape):
            return residual + self.forward(x)
        return rms_norm(x, norm_of(self.norm), residual) if is_alike else self.norm(x)


class KernelAngles(nn.Module):
    """RotaryEmbedding in one kernel."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: Ids, dtype: torch.dtype) -> tuple[Angles, Angles]:
        return angles(positions, self.rotary.inv_freq, self.rotary.attention_factor, dtype)


class KernelRotation(nn.Module):
    """FusedRotation in one kernel, if each token has an angle for each rotated number, in the dtype of x, contiguous."""

    def __init__(self, fused: FusedRotation) -> None:
        super().__init__()
        self.fused = fused

    @property
    def norm(self) -> Norm | tuple[None, float, bool]:
        """The norm of the heads, and for none what a Rotation has."""
        return (None, 0.0, False) if self.fused.norm is None else norm_of(self.fused.norm)

    def is_like(self, other: "KernelRotation") -> bool:
        """Whether the other rotates as many numbers of a head, after a norm of the same class if both have norms."""
        kinds = {type(fused.norm) for fused in (self.fused, other.fused)}
        return self.fused.num_rotated == other.fused.num_rotated and len(kinds - {type(None)}) <= 1

    def supports(self, x: Tensor, cos: Angles, sin: Angles) -> bool:
        read = [cos, sin, *(() if self.fused.norm is None else (self.fused.norm.weight,))]
        is_fitting = x.ndim == 3 and cos.shape == sin.shape == (len(x), 1, self.fused.num_rotated or x.shape[-1])
        return is_fitting and all(tensor.dtype is x.dtype and tensor.is_contiguous() for tensor in read)

    def forward(self, x: Heads, cos: Angles, sin: Angles) -> Heads:
        if self.supports(x, cos, sin):
            weight, eps, zero_centred = self.norm
            return rotate_and_store(with_whole_heads(x), Rotation(cos, sin, weight, eps, zero_centred=zero_centred))
        return cast(Tensor, self.fused(x, cos, sin))


class RotatedAttention(nn.Module):
    """Rotates queries and keys, and attends. Where Triton's kernels attend, one of them rotates and stores, or does it all.

    factor: by which rotated queries are multiplied. None: by none.
    """

    def __init__(self, rotation: KernelRotation, k_rotation: KernelRotation, factor: float | None = None) -> None:
        super().__init__()
        self.rotation, self.k_rotation, self.factor, self.arrivals = rotation, k_rotation, factor, Arrivals()

    def forward(
        self, attend: Attend, layer: int, q: Queries, k: Keys, v: Tensor, cos: Angles, sin: Angles, **options: Any
    ) -> Queries:
        step, place = attend, layer
        if isinstance(attend, GroupedAttend):
            group, place = attend.places[layer]
            step = attend.steps[group]
        is_supported = self.rotation.supports(q, cos, sin) and self.k_rotation.supports(k, cos, sin) and k.shape == v.shape
        if is_supported and isinstance(step, partial) and step.func is paged_attention:
            (weight, eps, is_zero_centred), (k_weight, k_eps, is_k) = self.rotation.norm, self.k_rotation.norm
            rotation = Rotation(cos, sin, weight, eps, k_weight, k_eps, self.factor, is_zero_centred or is_k)
            cache, metadata = step.args
            if not step.keywords and decode_kernels.supports_attention(q, metadata):
                return decode_attention(cache, metadata, place, q, k, v, rotation, self.arrivals, **options)
            return cast(Tensor, step(place, q, k, v, rotation=rotation, **options))
        q = self.rotation(q, cos, sin)
        q = q if self.factor is None else q * self.factor
        return attend(layer, q, self.k_rotation(k, cos, sin), v, **options)


class FewRowsLinear(nn.Module):
    """Computes a linear layer. norm: of x, before the product.

    activation: of the gate, a name in fuse.ACTIVATIONS: the layer holds gate and up, and activation(gate(x)) * up(x) is
    returned. None: there is no gate.
    """

    def __init__(self, linear: nn.Linear | IntegerLinear, activation: str | None = None) -> None:
        super().__init__()
        self.linear, self.activation, self.arrivals = linear, activation, Arrivals()
        self.norm: KernelRMSNorm | None = None
        self.is_invariant = False

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        linear, norm = self.linear, None if self.norm is None else norm_of(self.norm.norm)
        gate: dict[str, Any] = {} if self.activation is None else {"gated": True, "activation": self.activation}
        if isinstance(linear, IntegerLinear):
            if self.norm is not None and norm is not None and not linear.takes_norm(x, norm):
                x, norm = self.norm(x), None
            return cast(Tensor, linear(x, norm=norm, activation=self.activation))
        if self.is_invariant:
            x = x if self.norm is None else self.norm(x)
            return invariant_linear(x, linear.weight, linear.bias, **gate)
        if decode_kernels.supports(x, linear, norm):
            return decode_linear(x, linear.weight, linear.bias, norm=norm, **gate)
        x = x if self.norm is None else self.norm(x)
        if supports(x, linear):
            arrivals = self.arrivals if self.activation is None else None
            return few_rows_linear(x, linear.weight, linear.bias, arrivals=arrivals, **gate)
        return cast(Tensor, linear(x)) if self.activation is None else gate_and_mul(linear(x), self.activation)


class AddedLinear(nn.Module):
    """Computes residual + linear(x) without a bias: addmm adds the product to the residual, in place if in_place."""

    def __init__(self, linear: nn.Linear | IntegerLinear, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place, self.arrivals = linear, in_place, Arrivals()
        self.is_invariant = False

    def forward(self, x: Float[Tensor, "*rows in"], residual: Float[Tensor, "*rows_or_one out"]) -> Float[Tensor, "*rows out"]:
        linear, in_place = self.linear, self.in_place
        if residual.shape != (len(x), linear.out_features) or residual.dtype is not x.dtype or x.ndim != 2:
            return residual + cast(Tensor, linear(x))
        if isinstance(linear, IntegerLinear):
            return cast(Tensor, linear(x, residual.contiguous(), in_place=in_place))
        if self.is_invariant:
            residual = residual.contiguous()
            return invariant_linear(x, linear.weight, None, residual=residual, in_place=in_place, arrivals=self.arrivals)
        if residual.is_contiguous():
            if decode_kernels.supports(x, linear):
                return decode_linear(x, linear.weight, None, residual=residual, in_place=in_place)
            if supports(x, linear):
                return few_rows_linear(
                    x, linear.weight, None, residual=residual, in_place=in_place, arrivals=self.arrivals
                )  # fmt: skip
        add = torch.Tensor.addmm_ if in_place else torch.addmm
        return add(residual, x, linear.weight.t())


class Merges:
    """Makes the linear layers of a model in 16 bits: larger ones in place of several with the same input."""

    def __init__(self) -> None:
        # A linear layer -> the layers with which it was merged, and the layer that computes them.
        self.made: dict[nn.Linear, tuple[tuple[nn.Linear, ...], nn.Linear]] = {}

    def merged(self, fused: FusedLinear, trace: Trace) -> nn.Linear | None:
        """Return a layer that computes the layers of `fused`, whose weights become views of its weight.

        None: there is one layer, or a layer has to keep its own weight, because it is in another merge, or because the model
        reads the weight itself.
        """
        linears, read = fused.linears, {value for value in trace.owned.values() if isinstance(value, nn.Parameter)}
        if len(linears) == 1:
            return None
        is_new = len(set(linears)) == len(linears) and not any(linear in self.made for linear in linears)
        if is_new and read.isdisjoint(weight for linear in linears for weight in linear.parameters()):
            self.made |= dict.fromkeys(linears, (linears, fused.merged()))
        together, merged = self.made.get(linears[0], ((), None))
        return merged if together == linears else None

    def added(self, fused: FusedLinear) -> nn.Linear:
        """Return the layer that computes the only layer of `fused`."""
        return fused.linears[0]


def compile_for_cuda(trace: Trace, layers: Merges | IntegerLayers, *, is_invariant: bool = False) -> int:
    """Compile a trace in place. Returns the number of operations that this package's kernels or larger products compute.

    Args:
        layers: makes the linear layers of all traces of a model.
        is_invariant: whether the rows of products have the same bits in any number of rows (invariant.py).
    """
    fuse(trace)
    num_faster = 0
    for node in list(trace.graph.nodes):
        module = trace.module(node)
        faster: nn.Module | None = None
        if isinstance(module, FusedRotation):
            faster = KernelRotation(module)
        elif isinstance(module, RMSNorm) and type(module) in RMS_NORMS and module.weight.ndim == 1 and not has_hooks(module):
            faster = KernelRMSNorm(module)
        elif isinstance(module, RotaryEmbedding) and type(module).forward is RotaryEmbedding.forward and not has_hooks(module):
            faster = KernelAngles(module)
        elif isinstance(module, FusedLinear):
            faster = _faster_linear(trace, node, module, layers)
        elif node.target == "__call__" and len(node.args) == 5:
            _rotate_in_attention(trace, node, *node.args)
        if faster is not None:
            node.target = trace.name("kernel", faster)
            num_faster += 1
            if isinstance(faster, FewRowsLinear | AddedLinear):
                faster.is_invariant = is_invariant
    num_faster += _move_residuals_into_norms(trace, layers, is_invariant=is_invariant)
    _move_norms_into_products(trace)
    if isinstance(layers, Merges):  # integers have no adapters
        _add_adapters(trace, layers)
    return num_faster + fuse_experts(trace)


def _move_residuals_into_norms(trace: Trace, layers: Merges | IntegerLayers, *, is_invariant: bool) -> int:
    """Let a norm add the residual after it, and the kernels of few rows compute the product before it, as in Gemma 3.

    Returns the number of these products.
    """
    num_products, is_before = 0, {node: i for i, node in enumerate(trace.graph.nodes)}
    for node in list(trace.graph.nodes):
        if node.target not in ADD or len(node.args) != 2 or node.kwargs:
            continue
        for normed, residual in (node.args, node.args[::-1]):
            norm = trace.module(normed) if isinstance(normed, fx.Node) else None
            is_fitting = isinstance(norm, KernelRMSNorm) and len(normed.users) == 1 and isinstance(residual, fx.Node)
            if not is_fitting or normed.kwargs or is_before[residual] > is_before[normed]:
                continue
            normed.kwargs = {"residual": residual}
            node.replace_all_uses_with(normed)
            trace.graph.erase_node(node)
            product = normed.args[0]
            module = trace.module(product)
            if type(module) is FusedLinear and len(module.linears) == 1 and not (module.activation or product.kwargs):
                faster = FewRowsLinear(layers.added(module))
                faster.is_invariant = is_invariant
                product.target = trace.name("kernel", faster)
                num_products += 1
            break
    return num_products


def _move_norms_into_products(trace: Trace) -> None:
    """Let a product compute the norm before it, if nothing else reads the norm, and the norm's input stays until then."""
    written: set[fx.Node] = set()  # the residuals that the products so far have overwritten
    for node in list(trace.graph.nodes):
        module, x = trace.module(node), node.args[0] if node.args else None
        if isinstance(module, AddedLinear) and module.in_place:
            written.add(node.kwargs["residual"])
        if isinstance(module, FewRowsLinear) and isinstance(x, fx.Node) and len(x.users) == 1:
            norm = trace.module(x)
            if isinstance(norm, KernelRMSNorm) and not x.kwargs and x.args[0] not in written:
                module.norm, node.args = norm, x.args
                trace.graph.erase_node(x)


def _add_adapters(trace: Trace, merges: Merges) -> None:
    """Add the adapters of requests, which are hooks of layers, to the products of these layers."""
    layers_of = {merged: linears for linears, merged in merges.made.values()}
    for node in trace.graph.nodes:
        product = trace.module(node)
        if not isinstance(product, FewRowsLinear | AddedLinear) or isinstance(product.linear, IntegerLinear):
            continue
        linears = layers_of.get(product.linear, (product.linear,))
        if any(linear._forward_hooks for linear in linears):
            from nanoinfer.fast.cuda.lora import AdaptedProduct, copy_without_hooks

            product.linear, norm, activation = copy_without_hooks(product.linear), None, None
            plain = copy_without_hooks(product)
            if isinstance(plain, FewRowsLinear):
                (norm, activation), plain.norm, plain.activation = (plain.norm, plain.activation), None, None
            node.target = trace.name("adapted", AdaptedProduct(product, plain, linears, norm, activation))


def _rotate_in_attention(trace: Trace, node: fx.Node, attend: Any, layer: Any, q: Any, k: Any, v: Any) -> None:
    """Move rotations of q and k that only the attention reads into it, and a factor of the rotated q."""
    factor, scaled = None, q
    if isinstance(q, fx.Node) and q.target in MULTIPLY and len(q.users) == 1 and isinstance(q.args[1], float):
        q, factor = q.args[0], q.args[1]
    modules = [trace.module(x) if isinstance(x, fx.Node) and len(x.users) == 1 else None for x in (q, k)]
    rotations = [module for module in modules if isinstance(module, KernelRotation)]
    are_alike = len(rotations) == 2 and rotations[0].is_like(rotations[1])
    if are_alike and len({q, k, v}) == 3 and q.args[1:] == k.args[1:]:
        attention = RotatedAttention(rotations[0], rotations[1], factor)
        node.op, node.target = "call_module", trace.name("attention", attention)
        node.args = attend, layer, q.args[0], k.args[0], v, *q.args[1:]
        for rotated in dict.fromkeys((scaled, q, k)):
            trace.graph.erase_node(rotated)


def _faster_linear(trace: Trace, node: fx.Node, module: FusedLinear, layers: Merges | IntegerLayers) -> nn.Module | None:
    """Return the module that computes a linear layer with others, or with the addition after it. None: it stays as it is."""
    factor, residual = node.kwargs.get("factor"), node.kwargs.get("residual")
    gate = trace.module(factor) if isinstance(factor, fx.Node) else None
    if isinstance(factor, fx.Node) and isinstance(gate, FusedLinear) and not residual and _is_gate(factor, gate, node, module):
        gate_up = layers.merged(FusedLinear(*gate.linears, *module.linears), trace)
        if gate_up is not None:
            node.kwargs = {}
            trace.graph.erase_node(factor)
            return FewRowsLinear(gate_up, gate.activation)
    if isinstance(residual, fx.Node) and factor is None and module.activation is None and module.linears[0].bias is None:
        return AddedLinear(layers.added(module), in_place=_is_last_use(trace, residual, node))
    merged = None if node.kwargs or module.activation else layers.merged(module, trace)
    return None if merged is None else FewRowsLinear(merged)


def _is_gate(factor: fx.Node, gate: FusedLinear, node: fx.Node, module: FusedLinear) -> bool:
    """Whether the node is activation(gate(x)) * up(x), and nothing else reads the gate."""
    is_alike = len({linear.bias is None for linear in (*gate.linears, *module.linears)}) == 1
    is_of_same_input = factor.args == node.args and not factor.kwargs and len(factor.users) == 1
    return gate.activation is not None and module.activation is None and is_alike and is_of_same_input


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
