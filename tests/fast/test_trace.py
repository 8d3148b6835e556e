"""What is recorded of a forward pass, and that nobody else notices. fast/cpu/test_compile.py has more models."""

import threading

import pytest
import torch
from torch import nn

from nanoinfer.fast.fuse import FusedLinear, FusedRotation, fuse
from nanoinfer.fast.trace import trace
from nanoinfer.models.layers import RMSNorm, apply_rotary


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), RMSNorm(4, 1e-6)

    def forward(self, x, cos, sin):
        q, k = self.q(x).unflatten(-1, (2, 4)), self.k(x).unflatten(-1, (2, 4))
        return apply_rotary(self.norm(q), cos, sin) + apply_rotary(k, cos, sin)


class Router(nn.Module):
    """Sends rows to one of two layers by their values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        self.layers[0](x)  # recorded before the tracer gives up
        return self.layers[int(x.sum() > 0)](x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router, self.heads = nn.Linear(8, 8), Router(), Heads()

    def forward(self, x, cos, sin):
        return self.heads(self.router(self.first(x)), cos, sin)


class Waiting(nn.Module):
    """Lets another thread run while it is traced."""

    def __init__(self):
        super().__init__()
        self.has_begun, self.may_end, self.layer = threading.Event(), threading.Event(), nn.Linear(8, 8)

    def forward(self, x):
        self.has_begun.set()
        self.may_end.wait(600)
        return self.layer(x)


def modules_of(traced):
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]


@torch.inference_mode()
def test_a_trace_calls_layers_norms_and_rotations_which_are_fused_and_what_cannot_be_recorded_stays_one_call():
    model, x, angles = Model(), torch.randn(3, 8), torch.rand(3, 1, 4)
    expected = model(x, angles.cos(), angles.sin())
    traced = trace(model)
    assert modules_of(traced) == ["first", "router", "heads.q", "heads.k", "heads.norm"]
    assert [node.target for node in traced.graph.nodes].count(apply_rotary) == 2
    assert list(traced.untraced) == ["router"]
    fuse(traced)
    kinds = [type(module) for node in traced.graph.nodes if (module := traced.module(node))]
    assert (kinds.count(FusedLinear), kinds.count(FusedRotation), kinds.count(RMSNorm)) == (2, 2, 0)
    torch.testing.assert_close(torch.fx.GraphModule(traced.owned, traced.graph)(x, angles.cos(), angles.sin()), expected)
    with pytest.raises(TypeError, match=r"__int__|int\(\)|'Proxy'"):  # the error of a module of its own
        trace(Router())


def test_other_threads_call_their_modules_while_one_is_traced():
    waiting, other, found = Waiting(), Model(), []
    x, angles = torch.randn(3, 8), torch.rand(3, 1, 4)
    expected = other(x, angles, angles)
    thread = threading.Thread(target=lambda: found.append(trace(waiting)))
    thread.start()
    assert waiting.has_begun.wait(600)
    try:
        assert torch.equal(other(x, angles, angles), expected)
    finally:
        waiting.may_end.set()
        thread.join()
    assert modules_of(found[0]) == ["layer"]
