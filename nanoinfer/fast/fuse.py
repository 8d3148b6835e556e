"""Fuse the operations of a trace: what a kernel computes in one call becomes one call of a module of this file.

In: a Trace. Out: the same trace, changed in place. Each module defines what it computes in plain torch, so that a fused trace
runs on any device, and the kernels of cpu/ and cuda/ are compared with it. The passes:

    fuse_linears       each linear layer becomes a FusedLinear, to which the next passes add
    fuse_activations   activation(linear(x)) is one product
    fuse_factors       factor * linear(x) is one product: the gate of an MLP
    fuse_residuals     residual + linear(x) is one product
    merge_linears      linear layers of the same input are one product: q, k and v
    fuse_rotations     a norm over heads and the rotation after it, perhaps of a part of each head, are one operation
    fuse_gates         x * sigmoid(gate) is one operation
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, fx, nn

from nanoinfer.fast.trace import Trace, has_hooks
from nanoinfer.models.layers import Angles, Heads, RMSNorm, ZeroCentredRMSNorm, apply_rotary, gelu_tanh, partial_rotary, sigmoid

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}

RMS_NORMS = (RMSNorm, ZeroCentredRMSNorm)

ADD, MULTIPLY = (operator.add, torch.add, "add"), (operator.mul, torch.mul, "mul")  # as torch.fx names them


class FusedLinear(nn.Module):
    """Computes residual + factor * activation(x @ weight.T + bias), for one linear layer or several with the same input."""

    def __init__(self, *linears: nn.Linear, activation: str | None = None) -> None:
        super().__init__()
        self.linears = linears  # whose outputs are concatenated
        self.activation = activation  # a name in ACTIVATIONS. None: no activation
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)

    def forward(
        self,
        x: Float[Tensor, "rows in"],
        factor: Float[Tensor, "rows out_or_one"] | None = None,
        residual: Float[Tensor, "rows out"] | None = None,
    ) -> Float[Tensor, "rows out"]:
        outs = [linear(x) for linear in self.linears]
        out = torch.cat(outs, dim=-1) if len(outs) > 1 else outs[0]
        if self.activation is not None:
            out = ACTIVATIONS[self.activation](out)
        out = out if factor is None else factor * out
        return out if residual is None else residual + out

    def starts(self) -> Iterator[tuple[nn.Linear, int]]:
        """Yield each of `linears` with the index of its first output."""
        ends = accumulate(linear.out_features for linear in self.linears)
        return ((linear, end - linear.out_features) for linear, end in zip(self.linears, ends, strict=True))

    def merged(self) -> nn.Linear:
        """Return a layer that computes all of `linears`. The weights of several become views of its weights."""
        if len(self.linears) == 1:
            return self.linears[0]
        merged = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        merged.weight = nn.Parameter(torch.cat([linear.weight for linear in self.linears]), requires_grad=False)
        merged.register_parameter("bias", self.merged_bias())
        for linear, start in self.starts():
            for name, joined in merged.named_parameters():
                part = joined.narrow(0, start, linear.out_features)
                linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
        return merged

    def merged_bias(self) -> nn.Parameter | None:
        """The concatenated biases of `linears`. None: they have no biases."""
        if self.linears[0].bias is None:
            return None
        return nn.Parameter(torch.cat([linear.bias for linear in self.linears]), requires_grad=False)


class FusedRotation(nn.Module):
    """Applies apply_rotary to the first num_rotated numbers of each head (None: all), after an RMSNorm over the head if any."""

    def __init__(self, norm: RMSNorm | None, num_rotated: int | None = None) -> None:
        super().__init__()
        self.norm, self.num_rotated = norm, num_rotated

    def forward(self, x: Heads, cos: Angles, sin: Angles) -> Heads:
        x = x if self.norm is None else self.norm(x)
        return apply_rotary(x, cos, sin) if self.num_rotated is None else partial_rotary(x, cos, sin, self.num_rotated)


class FusedGate(nn.Module):
    """Computes x * sigmoid(gate)."""

    def forward(self, x: Float[Tensor, "*rows size"], gate: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return x * sigmoid(gate)


def fuse(trace: Trace) -> None:
    """Apply all passes."""
    passes = (fuse_linears, fuse_activations, fuse_factors, fuse_residuals, merge_linears, fuse_rotations, fuse_gates)
    for change in passes:
        change(trace)


def fuse_linears(trace: Trace) -> None:
    for node in list(trace.graph.nodes):
        module = trace.module(node)
        if type(module) is nn.Linear and len(node.args) == 1 and not (node.kwargs or has_hooks(module)):
            node.target = trace.name("linear", FusedLinear(module))


def fuse_activations(trace: Trace) -> None:
    for node in list(trace.graph.nodes):
        if (name := _activation_of(trace, node)) and (linear := _fusible(trace, node.args[0])):
            module = _module(trace, linear)
            if module.activation is None and not linear.kwargs:
                _replace(trace, node, linear, FusedLinear(*module.linears, activation=name))


def fuse_factors(trace: Trace) -> None:
    _fuse_operand(trace, MULTIPLY, "factor")


def fuse_residuals(trace: Trace) -> None:
    _fuse_operand(trace, ADD, "residual")


def merge_linears(trace: Trace) -> None:
    by_input: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in trace.graph.nodes:
        module = trace.module(node)
        if isinstance(module, FusedLinear) and module.activation is None and not node.kwargs:
            by_input.setdefault((node.args[0], module.linears[0].bias is None), []).append(node)
    for nodes in by_input.values():
        if len(nodes) > 1:
            _merge(trace, nodes)


def fuse_rotations(trace: Trace) -> None:
    for node in list(trace.graph.nodes):
        if node.target in (apply_rotary, partial_rotary) and not node.kwargs:
            x, cos, sin, *num_rotated = cast(Any, node.args)
            module, norm, rotated = trace.module(x) if isinstance(x, fx.Node) and len(x.users) == 1 else None, None, x
            if isinstance(module, RMSNorm) and type(module) in RMS_NORMS and module.weight.ndim == 1 and not has_hooks(module):
                norm, rotated = module, x.args[0]
            with trace.graph.inserting_before(node):
                name = trace.name("rotation", FusedRotation(norm, *num_rotated))
                fused = trace.graph.call_module(name, (rotated, cos, sin))
            _take_the_place(trace, node, fused)
            if norm is not None:
                trace.graph.erase_node(x)


def fuse_gates(trace: Trace) -> None:
    for node in list(trace.graph.nodes):
        if node.target in MULTIPLY and len(node.args) == 2 and not node.kwargs:
            for gated, other in (node.args[::-1], node.args):
                if isinstance(gated, fx.Node) and gated.target is sigmoid and len(gated.users) == 1:
                    with trace.graph.inserting_before(node):
                        fused = trace.graph.call_module(trace.name("gate", FusedGate()), (other, gated.args[0]))
                    _take_the_place(trace, node, fused)
                    trace.graph.erase_node(gated)
                    break


def _fuse_operand(trace: Trace, operations: tuple[object, ...], name: str) -> None:
    """Move a sum or product of a linear layer's output and another value into the layer. name: the layer's argument."""
    for node in list(trace.graph.nodes):
        if node.target in operations and len(node.args) == 2 and not node.kwargs:
            for linear, other in (node.args[::-1], node.args):
                if (fusible := _fusible(trace, linear)) and isinstance(other, fx.Node) and name not in fusible.kwargs:
                    _replace(trace, node, fusible, _module(trace, fusible), **{name: other})
                    break


def _merge(trace: Trace, nodes: Sequence[fx.Node]) -> None:
    """Put one product in place of the first layer. Each layer's output is a part of its result."""
    linears = [linear for node in nodes for linear in _module(trace, node).linears]
    with trace.graph.inserting_before(nodes[0]):
        merged = trace.graph.call_module(trace.name("linear", FusedLinear(*linears)), nodes[0].args)
    start = 0
    for node in nodes:
        size = _module(trace, node).out_features
        with trace.graph.inserting_before(node):
            part = trace.graph.call_method("narrow", (merged, -1, start, size))
        _take_the_place(trace, node, part)
        start += size


def _activation_of(trace: Trace, node: fx.Node) -> str | None:
    module = trace.module(node)
    approximate = node.kwargs.get("approximate")
    if (node.target is F.silu and not node.kwargs.get("inplace")) or type(module) is nn.SiLU:
        return "silu"
    if (node.target is F.gelu and approximate == "tanh") or (type(module) is nn.GELU and module.approximate == "tanh"):
        return "gelu_tanh"
    return None


def _fusible(trace: Trace, node: object) -> fx.Node | None:
    """Return the node if it is a linear layer without a residual whose result only this operation reads."""
    if isinstance(node, fx.Node) and isinstance(trace.module(node), FusedLinear) and len(node.users) == 1:
        return node if "residual" not in node.kwargs else None
    return None


def _module(trace: Trace, node: fx.Node) -> FusedLinear:
    module = trace.module(node)
    assert isinstance(module, FusedLinear)
    return module


def _replace(trace: Trace, node: fx.Node, linear: fx.Node, module: FusedLinear, **kwargs: Any) -> None:
    """Replace an operation by the linear layer before it, which now includes the operation."""
    with trace.graph.inserting_before(node):
        fused = trace.graph.call_module(trace.name("linear", module), linear.args, {**linear.kwargs, **kwargs})
    _take_the_place(trace, node, fused)
    trace.graph.erase_node(linear)


def _take_the_place(trace: Trace, node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    trace.graph.erase_node(node)
