"""A weight that is replaced is new wherever it is held, and what was computed from it is computed again."""

import torch
from torch import Tensor, nn

from nanoinfer.features.training.loaded_weights import LoadedWeights


class Doubled:
    """A KernelWeight: the weights of layers side by side, times two."""

    def __init__(self, num_outputs: int) -> None:
        self.weight, self.bias = torch.zeros(num_outputs, 3), torch.zeros(num_outputs)

    def write(self, name: str, values: Tensor, start: int) -> None:
        {"weight": self.weight, "bias": self.bias}[name][start : start + len(values)] = 2 * values

    def arrays(self) -> list[Tensor]:
        return [self.weight]


def held(*layers: nn.Linear) -> LoadedWeights:
    return LoadedWeights(nn.ModuleList(layers))


def test_write_renews_a_weight_for_every_kernel_and_leaves_the_others():
    first, second = nn.Linear(3, 2), nn.Linear(3, 4)
    weights, together, alone, of_nobody = held(first, second), Doubled(6), Doubled(4), Doubled(4)
    for layer, start in ((first, 0), (second, 2)):
        weights.add_kernel_weight(layer, together, start)
    weights.add_kernel_weight(second, alone, 0)
    new, before = torch.randn(4, 3), first.weight.clone()
    weights.write("1.weight", new)
    weights.write("1.bias", new[:, 0])
    assert torch.equal(second.weight, new)
    assert torch.equal(together.weight[2:], 2 * new)
    assert torch.equal(alone.weight, 2 * new)
    assert torch.equal(alone.bias, 2 * new[:, 0])
    assert torch.equal(first.weight, before)
    assert not together.weight[:2].any()
    assert not of_nobody.weight.any()  # a kernel's weight that was not added stays as it was


def test_a_weight_that_only_kernels_have_is_written_for_them():
    layer, doubled = nn.Linear(3, 4), Doubled(4)
    weights = held(layer)
    weights.add_kernel_weight(layer, doubled, 0)
    layer.register_parameter("weight", None)
    weights.write("0.weight", torch.ones(4, 3))
    assert torch.equal(doubled.weight, torch.full((4, 3), 2.0))
    assert [id(tensor) for tensor in weights.tensors()] == [id(layer.bias), id(doubled.weight)]


def test_what_was_computed_from_weights_is_computed_again_at_the_end_of_an_update():
    layer = nn.Linear(3, 4)
    weights, total = held(layer), torch.zeros(())
    weights.add_renewal(lambda: total.copy_(layer.weight.sum()))
    weights.write("0.weight", torch.ones(4, 3))
    assert total == 0
    weights.finish()
    assert total == 12
