"""The kernels of linear layers add what adapters/layers.py adds, for layers and ranks of any size, and change no other row."""

import pytest
import torch
from torch import nn

from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.adapters.layers import AdaptedLinear, AdapterMapping
from nanoinfer.features.adapters.lora import LowRankUpdate

pytestmark = pytest.mark.usefixtures("kernels")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.005}


def layers(dtype, sizes, num_in, ranks):
    """Linear layers with an adapter for each of `ranks`, all active. The last layer is not changed by the first adapter."""
    torch.manual_seed(0)
    mapping = AdapterMapping(len(ranks), max(ranks))
    linears = [nn.Linear(num_in, size).to(dtype) for size in sizes]
    of_layer = {}
    for linear in linears:
        adapted = of_layer[linear] = AdaptedLinear(linear, mapping)
        for index, rank in enumerate(ranks):
            update = LowRankUpdate(
                torch.randn(rank, num_in).to(dtype), torch.randn(linear.out_features, rank).to(dtype) / 8, 0.5
            )
            adapted.put(index, None if (index, linear) == (0, linears[-1]) and len(linears) > 1 else update)
    return linears, mapping, of_layer


def put_again(adapters, ranks):
    """Put the adapters into kernels that were made after them."""
    for adapted in adapters.values():
        for index in range(len(ranks)):
            adapted.put(index, adapted._updates.get(index))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("sizes", "activation"), [([20, 36, 9], None), ([64], "silu"), ([40], "gelu_tanh")])
def test_a_kernel_adds_the_adapter_of_each_row(dtype, sizes, activation):
    ranks = [3, 8]
    linears, mapping, adapters = layers(dtype, sizes, 50 if dtype is torch.float32 else 64, ranks)
    fused = FusedLinear(*linears, activation=activation)
    kernel = KernelLinear(PackedLinear(fused), ["residual"])
    put_again(adapters, ranks)
    for indices in ([1], [0, 1, -1, 1, 0], [i % 3 - 1 for i in range(70)]):
        x = torch.randn(len(indices), fused.in_features).to(dtype)
        residual = torch.randn(len(indices), fused.out_features).to(dtype)
        mapping.set([-1] * len(indices), torch.device("cpu"))
        plain = kernel(x, residual=residual)
        mapping.set(indices, torch.device("cpu"))
        out, tolerance = kernel(x, residual=residual), TOLERANCES[dtype]
        torch.testing.assert_close(out, fused(x, residual=residual), atol=tolerance, rtol=tolerance)
        changed = (out != plain).any(1).tolist()
        assert changed == [index >= 0 for index in indices]
        alone = []
        for row, index in enumerate(indices):
            mapping.set([index], torch.device("cpu"))
            alone.append(kernel(x[row : row + 1], residual=residual[row : row + 1]))
        assert torch.equal(torch.cat(alone), out)


def test_another_number_of_rows_than_the_steps_is_refused_by_the_plain_layer():
    linears, mapping, _ = layers(torch.float32, [8], 16, [4])
    mapping.set([0, 0], torch.device("cpu"))
    with pytest.raises(Exception, match="a linear layer has 3 rows in a step of 2; adapters of requests need models whose"):
        linears[0](torch.ones(3, 16))
