"""Packed linear layers: the same numbers within their rounding, the same bits in any batch."""

import pytest
import torch
from torch import nn

from nanoinfer.models.cpu_linear import LinearOptimizer, PackedLinear

KINDS = {  # arguments of an optimised layer, and what it computes of the plain layer's output and a residual
    "plain": ({}, lambda out, residual: out),
    "silu": ({"activation": "silu"}, lambda out, residual: nn.functional.silu(out)),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda out, residual: nn.functional.gelu(out, approximate="tanh")),
    "residual": ({"adds_residual": True}, lambda out, residual: residual + out),
}


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_nearly_the_plain_layers_numbers(dtype, tolerance, kind, bias):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    options, definition = KINDS[kind]
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    x, residual = torch.randn(70, 64).to(dtype), torch.randn(70, 96).to(dtype)
    given = (x, residual) if kind == "residual" else (x,)
    linears = LinearOptimizer()
    optimised = linears.optimize(layer, **options)
    together = optimised(*given)
    for start, stop in ((0, 1), (69, 70), (3, 5), (0, 16), (10, 43)) if linears.report().are_rows_independent else ():
        assert torch.equal(optimised(*(x[start:stop] for x in given)), together[start:stop])
    expected = definition(layer.float()(x.float()), residual.float())
    for out in (together, PackedLinear(layer.to(dtype), **options)(*given)):
        assert (out.float() - expected).abs().max() < tolerance
