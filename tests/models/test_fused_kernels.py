"""The fused kernels beside the plain modules they replace, interpreted on a CPU, compiled on a GPU."""

import copy

import pytest
import tiny_models
import torch

pytest.importorskip("triton")

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.models import loader
from nanoinfer.models.checkpoint import Checkpoint
from nanoinfer.models.fused_kernels import FusedResidualLinear, FusedRMSNorm, FusedRotation, FusedSwiGLU, fuse
from nanoinfer.models.layers import NormedRotation, ResidualLinear, RMSNorm, Rotation, SwiGLU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # of numbers around 1


def filled(module, dtype):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 + 0.5
    return module.to(DEVICE, dtype).requires_grad_(False)


def difference(plain, fused, *inputs):
    """From the plain module in float64; that the plain one is as far from it says that the tolerance means something."""
    expected = copy.deepcopy(plain).double()(*(x.double() for x in inputs))
    assert (plain(*inputs).double() - expected).abs().max() < TOLERANCE[inputs[0].dtype] * expected.abs().max()
    return ((fused(*inputs).double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [48, 64, 1024])
def test_rms_norm(dtype, size):
    norm = filled(RMSNorm(size, 1e-6), dtype)
    x = torch.randn(5, size, device=DEVICE).to(dtype)
    assert difference(norm, FusedRMSNorm(norm), x) < TOLERANCE[dtype]
    swapped = FusedRMSNorm(norm)
    swapped.weight = torch.nn.Parameter(norm.weight.flip(0))
    assert difference(norm, swapped, x) > 0.1  # the comparison notices


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("has_norm", [True, False])
def test_the_norm_of_a_head_and_its_rotation(dtype, head_dim, has_norm):
    """x is a view of a fused projection, its tokens far apart."""
    rotation = filled(NormedRotation(head_dim, 1e-6), dtype) if has_norm else Rotation()
    x = torch.randn(5, 7, head_dim, device=DEVICE).to(dtype)[:, 2:5]
    angles = torch.randn(5, 1, head_dim // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    assert difference(rotation, FusedRotation(rotation), x, cos, sin) < TOLERANCE[dtype]
    assert difference(rotation, FusedRotation(rotation), x, cos, -sin) < TOLERANCE[dtype]
    fused = FusedRotation(rotation)
    assert (fused(x, cos, sin) - rotation(x, cos, -sin)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [80, 1500])
def test_swiglu(dtype, size):
    mlp = filled(SwiGLU(48, size), dtype)
    x, residual = torch.randn(2, 5, 48, device=DEVICE).to(dtype)
    assert difference(mlp, FusedSwiGLU(mlp), x, residual) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_product_added_to_the_residual_where_it_lies(dtype):
    linear = filled(ResidualLinear(48, 30, bias=False), dtype)
    x, residual = torch.randn(5, 48, device=DEVICE).to(dtype), torch.randn(5, 30, device=DEVICE).to(dtype)
    before = residual.clone()
    assert difference(linear, FusedResidualLinear(linear), x, residual) < TOLERANCE[dtype]
    assert (residual != before).any()  # as its docstring says
    torch.testing.assert_close(residual, linear(x, before), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_yarn", "qwen3_attention_bias"])
def test_a_fused_model_gives_the_same_logits(family, tmp_path):
    checkpoint = Checkpoint.open(str(tiny_models.save(family, tmp_path)))
    plain, fused = (loader.load_model(checkpoint, "float32", DEVICE) for _ in range(2))
    fuse(fused)
    left = {type(module) for module in fused.modules()} & {RMSNorm, Rotation, NormedRotation, SwiGLU, ResidualLinear}
    assert left == ({ResidualLinear} if family == "qwen3_attention_bias" else set())  # o_proj has a bias there
    ids = torch.arange(1, 20, device=DEVICE)
    with torch.inference_mode():
        logits = [
            model.compute_logits(model(ids, torch.arange(19, device=DEVICE), DenseAttention())) for model in (plain, fused)
        ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
