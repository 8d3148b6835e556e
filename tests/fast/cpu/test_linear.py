"""Linear layers on a CPU: the same numbers within their rounding, the same bits in any batch."""

import pytest
import torch
from torch import nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu import linear
from nanoinfer.fast.cpu.linear import KernelEmbedding, KernelLinear, PackedLinear
from nanoinfer.fast.fuse import FusedLinear

pytestmark = pytest.mark.usefixtures("kernels")

KINDS = {  # activation, what a call gets besides x
    "plain": (None, ()),
    "silu": ("silu", ()),
    "gelu_tanh": ("gelu_tanh", ()),
    "residual": (None, ("residual",)),
    "gated": (None, ("factor",)),
    "all": ("silu", ("factor", "residual")),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kernel_of(fused, others=()):
    return KernelLinear(PackedLinear(fused), others)


def packing_kernel_of(monkeypatch, fused, others=()):
    with monkeypatch.context() as patch:
        patch.setattr(linear, "packs_faster", lambda *_: True)
        return kernel_of(fused, others)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (34, 1), (2, 131), (770, 49)])
def test_the_kernel_gives_a_row_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    num_in, num_out, dtype, kind, monkeypatch
):
    torch.manual_seed(0)
    activation, others = KINDS[kind]
    layer = nn.Linear(num_in, num_out).to(dtype)
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t())  # as a transposed checkpoint has it
    x = torch.randn(200, num_in).to(dtype)
    given = {name: torch.randn(200, num_out).to(dtype) for name in others}
    x[70] = 50 * x[70]  # far along the activation's axis
    fused = FusedLinear(layer, activation=activation)
    kernel, packing = kernel_of(fused, others), packing_kernel_of(monkeypatch, fused, others)
    together = kernel(x, **given)
    expected = FusedLinear(layer.float(), activation=activation)(x.float(), **{name: y.float() for name, y in given.items()})
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(together.float(), expected, atol=1e-5, rtol=tolerance)
    for num_rows in (1, 2, 7, 8, 9, 24, 25, 97):
        rows = slice(70, 70 + num_rows)
        for either in (kernel, packing):
            assert torch.equal(either(x[rows], **{name: y[rows] for name, y in given.items()}), together[rows])
    torch.set_num_threads(3)
    try:
        assert torch.equal(kernel(x, **given), together)
        assert torch.equal(packing(x, **given), together)
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (34, 1), (770, 49)])
def test_an_embedding_reads_the_rows_of_the_heads_weight(num_in, num_out, dtype):
    layer = nn.Linear(num_in, num_out, bias=False).to(dtype)
    packed = PackedLinear(FusedLinear(layer))
    ids = torch.tensor([num_out - 1, 0, num_out // 2, 0])
    assert torch.equal(KernelEmbedding(packed)(ids), layer.weight[ids])
    assert KernelEmbedding(packed)(ids[:0]).shape == (0, num_in)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
def test_several_layers_of_one_input_are_one_product(bias):
    torch.manual_seed(0)
    layers = [nn.Linear(16, size, bias=bias) for size in (8, 3, 20)]
    x = torch.randn(5, 16)
    together = kernel_of(FusedLinear(*layers))(x)
    for layer, part in zip(layers, together.split([8, 3, 20], dim=1), strict=True):
        assert torch.equal(part, kernel_of(FusedLinear(layer))(x))
        torch.testing.assert_close(part, layer(x))


def test_rows_may_have_any_axes_and_are_refused_in_another_dtype_or_size():
    kernel = kernel_of(FusedLinear(nn.Linear(4, 6)))
    x = torch.randn(2, 3, 4)
    assert kernel(x).shape == (2, 3, 6)
    assert torch.equal(kernel(x).flatten(0, 1), kernel(x.flatten(0, 1)))
    assert kernel(torch.zeros(0, 4)).shape == (0, 6)
    with pytest.raises(UnsupportedError, match=r"rows of 4 numbers in torch.float32, got \(1, 4\) in torch.bfloat16"):
        kernel(torch.zeros(1, 4, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match=r"rows of 4 numbers in torch.float32, got \(1, 5\)"):
        kernel(torch.zeros(1, 5))
    with pytest.raises(UnsupportedError, match="support float32, bfloat16 and float16, not float64"):
        PackedLinear(FusedLinear(nn.Linear(4, 4).double()))
