"""The kernels between products: norms and rotations, alone in a program."""

import pytest
import torch
from torch import nn

from nanoinfer.fast.cpu.layers import add_call, has_kernel, norm_call, rotate_call
from nanoinfer.fast.cpu.program import Program, Slice
from nanoinfer.models.layers import RMSNorm, ZeroCentredRMSNorm, apply_rotary

pytestmark = pytest.mark.usefixtures("kernels")
dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 2e-6),
        pytest.param(torch.bfloat16, 0.04, id="bfloat16"),
        pytest.param(torch.float16, 0.005, id="float16"),
    ],
)


def normed(norm, x):
    out, rows = torch.empty_like(x), Slice(0, 0, x.shape[1])
    Program([norm_call(norm, rows, Slice(1, 0, x.shape[1]))])(len(x), (x, out))
    return out


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("size", [1, 2, 15, 64, 83])
def test_norms_give_the_numbers_of_torch_and_a_row_the_same_bits_in_any_batch(size, dtype, tolerance):
    torch.manual_seed(0)
    norms = RMSNorm(size, 1e-6), ZeroCentredRMSNorm(size, 1e-6), nn.LayerNorm(size, 1e-5)
    for norm in norms:
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, -2, 2)
        norm = norm.to(dtype)
        x = (torch.randn(9, size) * 3 + 1).to(dtype)
        ours = normed(norm, x)
        assert torch.equal(normed(norm, x[4:5]), ours[4:5])
        largest = norm(x).float().abs().max().clamp(min=1)
        assert (ours.float() - norm(x).float()).abs().max() <= 4 * tolerance * largest


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, bias=False), nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm((2, 8))])
def test_other_norms_have_no_kernel(norm):
    assert not has_kernel(norm)
    assert has_kernel(nn.LayerNorm(8))


@torch.inference_mode()
@dtypes
def test_rows_are_added_also_parts_of_them_and_in_place(dtype, tolerance):
    x, y = torch.randn(5, 40).to(dtype), torch.randn(5, 21).to(dtype)
    expected = torch.cat((x[:, :7], x[:, 7:28] + y, x[:, 28:]), dim=1)
    Program([add_call(dtype, 21, Slice(0, 7, 40), Slice(1, 0, 21), Slice(0, 7, 40))])(5, (x, y))
    assert torch.equal(x, expected)


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("norm_class", [RMSNorm, ZeroCentredRMSNorm, None])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (4, 1, 10), (3, 1, 2)])
def test_queries_and_keys_are_rotated_as_in_python_and_values_are_not(
    num_heads, num_kv_heads, head_dim, norm_class, dtype, tolerance
):
    torch.manual_seed(0)
    nums, num_tokens = [num_heads, num_kv_heads, num_kv_heads], 5
    qkv = torch.randn(num_tokens, sum(nums), head_dim).to(dtype)
    angles = torch.rand(num_tokens, 1, head_dim // 2).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = [None, None]
    if norm_class is not None:
        norms = [norm_class(head_dim, 1e-6).to(dtype) for _ in range(2)]
        for norm in norms:
            nn.init.uniform_(norm.weight)
    *rotated, values = qkv.split(nums, dim=1)
    rotated = [part if norm is None else norm(part) for part, norm in zip(rotated, norms, strict=True)]
    expected = torch.cat([*(apply_rotary(part, cos, sin) for part in rotated), values], dim=1)
    slices = Slice(0, 0, sum(nums) * head_dim), Slice(1, 0, head_dim), Slice(2, 0, head_dim)
    keys = Slice(0, num_heads * head_dim, sum(nums) * head_dim)
    rotate_queries = rotate_call(dtype, (num_heads, head_dim), norms[0], *slices, slices[0])
    rotate_keys = rotate_call(dtype, (num_kv_heads, head_dim), norms[1], keys, *slices[1:], keys)
    Program([rotate_queries, rotate_keys])(num_tokens, (qkv, cos, sin))
    assert torch.equal(qkv[:, -num_kv_heads:], values)
    assert (qkv.float() - expected.float()).abs().max() < 2 * tolerance
