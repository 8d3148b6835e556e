"""The kernel for few rows gives torch's linear layers, and a row the same bits in any batch. test_layouts.py has gates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import triton_interpreter  # noqa: F401

pytest.importorskip("triton")

from nanoinfer.fast.cuda.linear_kernel import MAX_ROWS, few_rows_linear, supports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(num_rows, num_in, num_out, dtype):
    generator = torch.Generator().manual_seed(num_rows * num_in + num_out)
    sizes = (num_rows, num_in), (num_out, num_in), (num_out,), (num_rows, num_out)
    x, weight, bias, residual = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)
    return x, weight * num_in**-0.5, bias, residual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_in", "num_out"), [(1, 64, 48), (3, 300, 40), (MAX_ROWS, 520, 17)])
def test_rows_equal_torchs_in_float64(num_rows, num_in, num_out, dtype):
    x, weight, bias, residual = tensors(num_rows, num_in, num_out, dtype)
    product = F.linear(x.double(), weight.double())
    rounding = torch.finfo(dtype).eps
    for got, expected in (
        (few_rows_linear(x, weight, None), product),
        (few_rows_linear(x, weight, bias), product + bias.double()),
        (few_rows_linear(x, weight, None, residual=residual), product + residual.double()),
    ):
        torch.testing.assert_close(got.double(), expected, atol=rounding, rtol=rounding)
    out = few_rows_linear(x, weight, None, residual=residual, in_place=True)
    assert out is residual
    assert torch.equal(out, got)


def test_a_row_has_the_same_bits_in_any_number_of_rows():
    x, weight, _, _ = tensors(MAX_ROWS, 300, 40, torch.bfloat16)
    together = few_rows_linear(x, weight, None)
    assert torch.equal(together[5:6], few_rows_linear(x[5:6], weight, None))


def test_more_rows_fp32_and_weights_that_are_not_contiguous_are_torchs():
    linear = nn.Linear(4, 6, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.empty(MAX_ROWS, 4, dtype=torch.bfloat16)
    assert supports(x, linear)
    assert not supports(torch.empty(MAX_ROWS + 1, 4, dtype=torch.bfloat16), linear)
    assert not supports(torch.empty(1, 4), linear)
    assert not supports(torch.empty(1, 2, 4, dtype=torch.bfloat16), linear)  # rows with more axes
    assert not supports(torch.empty(4, 2, dtype=torch.bfloat16).t(), linear)
    linear.bias = nn.Parameter(torch.empty(12, dtype=torch.bfloat16)[::2], requires_grad=False)
    assert not supports(x, linear)
    linear.bias, linear.weight = None, nn.Parameter(linear.weight.t().contiguous().t(), requires_grad=False)
    assert not supports(x, linear)
