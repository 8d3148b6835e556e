"""The fused kernels beside the plain operations that they replace, interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from nanoinfer.attention.triton import rotate_and_store
from nanoinfer.fast.cuda.compile import AddedLinear, KernelRMSNorm
from nanoinfer.fast.cuda.fused_kernels import silu_and_mul
from nanoinfer.models.layers import RMSNorm, apply_rotary
from tests.helpers import triton_interpreter  # noqa: F401

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of numbers around 1

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def weights(*shape, dtype):
    return (torch.randn(shape) * 0.3 + 0.5).to(DEVICE, dtype)


def rms_norm_of(weight):
    norm = RMSNorm(len(weight), 1e-6)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def difference(plain, fused, *inputs):
    """From the plain operation in float64. That the plain one is as far from it shows that the tolerance means something."""
    expected = plain(*(x.double() for x in inputs))
    assert (plain(*inputs).double() - expected).abs().max() < TOLERANCE[inputs[0].dtype] * expected.abs().max()
    return ((fused(*inputs).double() - expected).abs().max() / expected.abs().max()).item()


@dtypes
@pytest.mark.parametrize("shape", [(5, 48), (5, 64), (5, 1024), (3, 4, 16)], ids=str)
def test_rms_norm(dtype, shape):
    x, weight = torch.randn(shape, device=DEVICE).to(dtype), weights(shape[-1], dtype=dtype)

    def plain(x, weight):
        return rms_norm_of(weight)(x)

    assert difference(plain, lambda x, weight: KernelRMSNorm(rms_norm_of(weight))(x), x, weight) < TOLERANCE[dtype]
    assert difference(plain, lambda x, weight: KernelRMSNorm(rms_norm_of(weight.flip(0)))(x), x, weight) > 0.1  # it notices


@dtypes
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("has_norm", [True, False])
def test_the_norm_of_a_head_and_its_rotation(dtype, head_dim, has_norm):
    """x is a view of a merged projection. Its tokens are not contiguous."""
    x = torch.randn(5, 7, head_dim, device=DEVICE).to(dtype)[:, 2:5]
    angles = torch.randn(5, 1, head_dim // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = weights(head_dim, dtype=dtype)

    def plain(x, cos, sin, weight):
        return apply_rotary(rms_norm_of(weight)(x) if has_norm else x, cos, sin)

    def fused(x, cos, sin, weight):
        return rotate_and_store(x, (cos, sin, weight if has_norm else None, 1e-6, None, 0.0))

    assert difference(plain, fused, x, cos, sin, weight) < TOLERANCE[dtype]
    assert difference(plain, fused, x, cos, -sin, weight) < TOLERANCE[dtype]
    assert (fused(x, cos, sin, weight) - plain(x, cos, -sin, weight)).abs().max() > 0.1


@dtypes
@pytest.mark.parametrize("size", [80, 1500])
def test_silu_and_mul(dtype, size):
    gate_up = torch.randn(5, 2 * size, device=DEVICE).to(dtype)

    def plain(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    assert difference(plain, silu_and_mul, gate_up) < TOLERANCE[dtype]
    assert difference(plain, lambda gate_up: silu_and_mul(gate_up.roll(size, 1)), gate_up) > 0.1


@dtypes
@pytest.mark.parametrize("in_place", [True, False])
def test_a_product_added_to_the_residual(dtype, in_place):
    linear = nn.Linear(48, 30, bias=False, device=DEVICE, dtype=dtype).requires_grad_(False)
    x, residual = torch.randn(5, 48, device=DEVICE).to(dtype), torch.randn(5, 30, device=DEVICE).to(dtype)
    before = residual.clone()
    expected = before.double() + linear.double()(x.double())
    out = AddedLinear(linear.to(dtype), in_place=in_place)(x, residual)
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()
    assert (out.data_ptr() == residual.data_ptr()) == in_place
    assert (out - before).abs().max() > 0.1


@pytest.mark.parametrize("strided", [True, False])
def test_a_product_added_to_a_vector_or_to_columns(strided):
    """The kernel for few rows reads neither."""
    linear = nn.Linear(48, 30, bias=False, device=DEVICE, dtype=torch.float16).requires_grad_(False)
    x = torch.randn(5, 48, device=DEVICE).half()
    residual = torch.randn(5, 60, device=DEVICE).half()[:, ::2] if strided else torch.randn(30, device=DEVICE).half()
    expected = residual.double() + x.double() @ linear.weight.double().t()
    assert (AddedLinear(linear, in_place=False)(x, residual).double() - expected).abs().max() < 0.02
