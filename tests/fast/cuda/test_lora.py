"""A compiled model adds the adapter of each row as its file does. Triton interprets the kernels on a CPU."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cuda import compile
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.fast.cuda.lora import AdaptedProduct, use_kernels
from nanoinfer.features.adapters.layers import AdaptedLinear, AdapterMapping
from nanoinfer.features.adapters.lora import LowRankUpdate
from nanoinfer.models.layers import RMSNorm
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.triton_interpreter import launched

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# of numbers around 1: a rounding of each of the products with A, B and W, and of the sum
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.04}
RANKS = 3, 20


class Layers(nn.Module):
    """Merged layers with a norm before them and a gate after them, one with a residual, and one as torch computes it."""

    def __init__(self):
        super().__init__()
        self.norm, self.bias = RMSNorm(48, 1e-6), nn.Linear(48, 36)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((48, 70), (48, 70), (70, 48)))
        nn.init.ones_(self.norm.weight)

    def forward(self, x):
        y = self.norm(x)
        return self.bias((x * 1) + self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


def adapted(dtype):
    """The model, the index of each row, and its layers' adapters. The first adapter does not change `up`."""
    torch.manual_seed(0)
    model, mapping = Layers().to(DEVICE, dtype).requires_grad_(False), AdapterMapping(len(RANKS), max(RANKS))
    layers = {name: AdaptedLinear(linear, mapping) for name, linear in model.named_children() if isinstance(linear, nn.Linear)}
    return model, mapping, layers


def put(model, layers):
    generator = torch.Generator().manual_seed(1)
    for index, rank in enumerate(RANKS):
        for name, layer in layers.items():
            num_out, num_in = getattr(model, name).weight.shape
            a, b = (torch.randn(shape, generator=generator) for shape in ((rank, num_in), (num_out, rank)))
            update = LowRankUpdate((a / 7).to(model.bias.weight), (b / 4).to(model.bias.weight), 0.5)
            layer.put(index, None if (index, name) == (0, "up") else update)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_get_what_their_adapters_add(dtype):
    plain, plain_mapping, plain_layers = adapted(dtype)
    model, mapping, layers = adapted(dtype)
    compiled = compile_model(model).model
    use_kernels(compiled, 40)
    products = [module for module in compiled.forward.__self__.modules() if isinstance(module, AdaptedProduct)]
    assert [type(one.plain) for one in products] == [compile.FewRowsLinear, compile.AddedLinear]
    assert [one.activation for one in products] == ["silu", None]
    put(plain, plain_layers)
    for _ in range(2):  # over what is there
        put(model, layers)
    for indices in ([1], [0, 1, -1], [row % 3 - 1 for row in range(21)]):
        x = torch.randn(len(indices), 48, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
        for its in (mapping, plain_mapping):
            its.set(indices, DEVICE)
        with launched() as launches:
            out = compiled(x)
        assert [name for name, _ in launches].count("_shrink_kernel") == 3
        expected = plain(x)
        assert (out - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()
        plain_mapping.set([-1] * len(indices), DEVICE)
        is_changed = ((out - plain(x)).abs().amax(1) > 0.1 * expected.abs().max()).tolist()
        assert is_changed == [index >= 0 for index in indices]


@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others():
    model, mapping, layers = adapted(torch.float32)
    use_kernels(model, 40)  # each layer by itself, because nothing is compiled
    put(model, layers)
    x, indices = torch.randn(21, 48, device=DEVICE), [row % 3 - 1 for row in range(21)]
    together = layers["bias"].add

    def added(rows):
        mapping.set([indices[row] for row in rows], DEVICE)
        mapping.kernels.begin(model, (x[rows],))
        return together(x[rows], torch.zeros(len(rows), 36, device=DEVICE))

    assert torch.equal(torch.cat([added([row]) for row in range(21)]), added(list(range(21))))


def test_a_layer_with_other_rows_than_the_step_is_refused():
    model, mapping, _ = adapted(torch.float32)
    use_kernels(model, 40)
    mapping.set([0, 0], DEVICE)
    mapping.kernels.begin(model, (torch.ones(2),))
    with pytest.raises(UnsupportedError, match="a linear layer has 3 rows in a step of 2; adapters of requests need models"):
        model.up(torch.ones(3, 48, device=DEVICE))
