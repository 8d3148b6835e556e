"""Linear layers of any number of rows are the definition, and a row has the same bits in each. The interpreter is enough.

tests/emulated_gpu compares the bits of the two kernels that a GPU with tensor cores has for few rows and for more.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from nanoinfer.fast.cuda.invariant import invariant_linear, make_linears_invariant
from nanoinfer.fast.cuda.linear_kernel import Arrivals
from tests.helpers.triton_interpreter import launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("gated", "has_bias", "is_split"), [(False, True, False), (True, False, False), (True, True, False), (False, False, True)]
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(dtype, gated, has_bias, is_split):
    generator = torch.Generator().manual_seed(0)
    shapes = (70, 1100), (50 * (1 + gated), 1100), (50 * (1 + gated),), (70, 50)
    x, weight, bias, residual = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    weight, arrivals = weight / 1100**0.5, Arrivals() if is_split else None
    added = bias if has_bias else None
    outs = [
        invariant_linear(
            x[rows], weight, added, gated=gated, residual=residual[rows].clone() if is_split else None, arrivals=arrivals,
            in_place=is_split,
        )
        for rows in (slice(0, 70), slice(30, 46), slice(41, 44), slice(43, 44))
    ]  # fmt: skip
    assert torch.equal(outs[0][30:46], outs[1])
    assert torch.equal(outs[0][41:44], outs[2])
    assert torch.equal(outs[0][43:44], outs[3])
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0) + (residual.double() if is_split else 0)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = gate * torch.sigmoid(gate) * up
    rounding = {torch.float32: 1e-5, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(outs[0].double(), expected, rtol=rounding, atol=rounding)


def test_every_linear_layer_of_a_model_takes_the_kernel():
    """Also of rows that are not contiguous, in more dimensions. A layer of a subclass keeps its own product."""

    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(40, 30), nn.ModuleDict({"inside": nn.Linear(30, 20, bias=False)})["inside"], Own(20, 10))
    model, x = model.to(DEVICE), torch.randn(2, 3, 80, device=DEVICE)[..., ::2]
    with torch.inference_mode():
        expected = model(x)
        make_linears_invariant(model)
        with launched() as kernels:
            torch.testing.assert_close(model(x), expected)
    assert [name for name, _ in kernels] == ["_invariant_linear_kernel"] * 2
