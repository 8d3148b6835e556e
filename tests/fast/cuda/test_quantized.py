"""Linear layers in 8 and 4 bits on a GPU give what the integers of their definition give, for any number of rows."""

import pytest
import torch

pytest.importorskip("triton")

from nanoinfer.fast.cuda import quantized as cuda
from nanoinfer.fast.cuda.fused_kernels import Norm
from nanoinfer.fast.cuda.integers import definition
from nanoinfer.fast.cuda.quantized import IntegerLinear, Scratch
from nanoinfer.fast.fuse import ACTIVATIONS, FusedLinear
from nanoinfer.features.quantization.rounding import quantized
from tests.helpers.triton_interpreter import launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
U, E = 2**-11, 2**-24  # the unit roundoffs of fp16 and of fp32


def layers(num_in, *nums_out, bias=False):
    """Layers with the same input, in fp16."""
    return FusedLinear(*(torch.nn.Linear(num_in, num, bias, DEVICE, torch.float16).requires_grad_(False) for num in nums_out))


def in_integers(fused, bits):
    model = torch.nn.ModuleList(fused.linears)
    return IntegerLinear(fused, bits, Scratch(model, torch.float16, torch.device(DEVICE)), torch.device(DEVICE), {})


def widened(fused, bits):
    return torch.cat([piece.widened() for piece in quantized([linear.weight for linear in fused.linears], bits)])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("option", ["bias", "residual", "norm and gate"])
def test_any_number_of_rows_is_multiplied_by_the_integers_of_the_definition(bits, option, monkeypatch):
    """A sum of n terms is off by (n + 32) e of their magnitudes, and by u where weights are widened. The scratch is small."""
    monkeypatch.setattr(cuda, "SCRATCH_BYTES", 2 * 160 * 7)
    torch.manual_seed(0)
    fused = layers(160, 18, 18, bias=option == "bias")  # groups of 32
    layer, weight = in_integers(fused, bits), widened(fused, bits).double()
    magnitude = weight.abs() + 256 * layer.weight.scales.repeat_interleave(layer.weight.group_size, 1)
    seen = set()
    for num_rows in (1, 4, 5, 16, 17):
        x = torch.randn(num_rows, 163, device=DEVICE).half()[:, :160]
        residual = torch.randn(num_rows, 36, device=DEVICE).half()
        norm, given = Norm(torch.randn(160, device=DEVICE).half(), 1e-6), {}
        rows = x.double()
        if option == "norm and gate":
            given = {"activation": "silu", "norm": norm if layer.takes_norm(x, norm) else None}
            if given["norm"]:
                rows = (rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()).half().double()
        exact, terms = rows @ weight.T, rows.abs() @ magnitude.double().T
        added = fused.merged_bias() if option == "bias" else residual if option == "residual" else None
        if added is not None:
            exact, terms = exact + added.double(), terms + added.double().abs()
        tolerance = terms * 192 * E + rows.abs() @ weight.abs().T * U * (num_rows > 4) + U * exact.abs()
        if option == "norm and gate":  # the rounding of a normed number may fall on either side
            tolerance += 2 * U * (rows.square() @ weight.square().T).sqrt() * 4
            (gate, up), (of_gate, of_up) = exact.chunk(2, -1), tolerance.chunk(2, -1)
            exact, silu = ACTIVATIONS["silu"](gate) * up, ACTIVATIONS["silu"](gate)
            # Where gate and up are rounded before the gate, both roundings are in the tolerance.
            tolerance = 1.1 * up.abs() * of_gate + silu.abs() * of_up + 2 * U * exact.abs() + 1.1 * of_gate * of_up
        with launched() as launches:
            out = layer(x, residual.clone() if option == "residual" else None, in_place=option == "residual", **given)
        seen |= {name for name, _ in launches}
        assert (out.double() - exact).abs().le(tolerance).all(), num_rows
        assert not (out.double().roll(1, -1) - exact).abs().le(tolerance).all()
    assert seen >= {"_integer_linear_kernel", "_linear_kernel", "_widen_kernel"}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_that_is_replaced_has_the_integers_of_the_new_one(bits):
    """Of the second of two layers."""
    fused, other = layers(64, 3, 4), layers(64, 4)
    layer = in_integers(fused, bits)
    assert torch.equal(definition(layer.weight), widened(fused, bits))
    layer.write("weight", other.linears[0].weight, 3)
    expected = torch.cat((widened(fused, bits)[:3], widened(other, bits)))
    assert torch.equal(definition(layer.weight), expected)
    assert not torch.equal(expected, widened(fused, bits))
