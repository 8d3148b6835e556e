"""Experts in kernels give the plain sum, in two launches for few rows and four for more, and the model keeps its weights once.

Triton interprets the kernels on a CPU, and compiles them on a GPU. tests/emulated_gpu has the tolerances, and injected faults.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from nanoinfer.fast.cuda import experts
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.fast.cuda.experts import KernelExperts
from nanoinfer.features.training.stored import StoredParameter
from nanoinfer.models.layers import SwiGLU
from nanoinfer.models.qwen_moe import Experts
from tests.emulated_gpu import cases
from tests.helpers.triton_interpreter import launched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mixture(num_experts=4):
    torch.manual_seed(0)
    return Experts(SwiGLU(24, 20) for _ in range(num_experts)).requires_grad_(False).to(DEVICE)


def routed(num_rows, num_experts=4):
    """Rows, the weights of two experts for each, and the experts."""
    generator = torch.Generator().manual_seed(num_experts)
    x, scores = (torch.randn(num_rows, size, generator=generator).to(DEVICE) for size in (24, num_experts))
    return x, *scores.softmax(-1).topk(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "option"), [(torch.float32, "silu"), pytest.param(torch.float16, "clamped with bias", marks=pytest.mark.long)]
)
def test_each_row_gets_the_weighted_sum_of_its_experts(dtype, option):
    assert cases.check_experts(dtype, option, DEVICE) <= 1


@pytest.mark.slow
def test_a_row_has_the_same_bits_among_other_rows_and_however_many_pairs_are_listed_at_a_time(monkeypatch):
    kernels, given = KernelExperts(mixture()), routed(40)
    together = kernels(*given)
    assert torch.equal(together[3:9], kernels(*(tensor[3:9] for tensor in given)))
    assert torch.equal(together[3:4], KernelExperts(mixture(), is_invariant=True)(*(tensor[3:4] for tensor in given)))
    monkeypatch.setattr(experts, "_LISTED", 16)
    assert torch.equal(together, kernels(*given))


def test_sizes_of_tiles_are_powers_of_two_however_many_experts_a_row_has():
    sizes = [
        experts._columns_and_tile(size, inner, 2 * k, 1) for size in (9000, 300) for inner in (70, 768) for k in range(1, 11)
    ]
    assert all(number & (number - 1) == 0 < number for pair in sizes for number in pair)
    assert max(columns for columns, _ in sizes) > 1


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is off")
def test_few_rows_have_two_launches_and_more_have_four():
    kernels, found = KernelExperts(mixture()), {}
    for num_rows in (1, 4, 5):
        with launched() as launches:
            kernels(*routed(num_rows))
        found[num_rows] = [name for name, _ in launches]
    few = ["_few_gated_kernel", "_few_down_kernel"]
    assert found == {1: few, 4: few, 5: ["_list_kernel", "_grouped_kernel", "_grouped_kernel", "_sum_pairs_kernel"]}


def test_layers_are_views_of_the_kernels_weights_and_an_update_reaches_both():
    plain, given = mixture(), routed(3)
    kernels = KernelExperts(plain)
    for _ in range(2):
        torch.testing.assert_close(kernels(*given), plain.weighted_sum(*given))
        for weight in plain.parameters():
            weight.copy_(torch.randn_like(weight) / 4)
    kept = {weight.untyped_storage().data_ptr() for weight in (*plain.parameters(), *kernels.parameters())}
    assert len(kept) == 2


class Other(SwiGLU):
    """An MLP of a user's own."""

    def forward(self, x):
        return super().forward(x) * 2


def hooked(mlps):
    mlps[1].up_proj.register_forward_hook(lambda module, args, out: out * 2)


def to_be_rounded(mlps):
    mlps[0].up_proj.weight = StoredParameter(mlps[0].up_proj.weight, requires_grad=False)


def of_another_kind(mlps):
    mlps[2] = Other(24, 20)


def of_other_sizes(mlps):
    mlps[2] = SwiGLU(24, 16)


def with_a_bias(mlps):
    mlps[2] = SwiGLU(24, 20, bias=True)


def used_twice(mlps):
    mlps[2] = mlps[1]


@pytest.mark.parametrize("change", [None, hooked, to_be_rounded, of_another_kind, of_other_sizes, with_a_bias, used_twice])
def test_experts_that_the_kernels_do_not_compute_stay_as_they_are_and_keep_steps_from_being_captured(change):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = mixture()

        def forward(self, x, weights, chosen):
            return self.experts.weighted_sum(x, weights, chosen)

    model, given = Model(), routed(6)
    if change is not None:
        change(model.experts)
    expected = model(*given)
    compiled = compile_model(model.to(DEVICE).requires_grad_(False))
    kinds = {type(module) for module in compiled.model.modules()} & {Experts, KernelExperts}
    assert kinds == {KernelExperts if change is None else Experts}
    can_capture = all(getattr(module, "supports_cuda_graph", True) for module in compiled.model.modules())
    assert can_capture == (change is None)
    torch.testing.assert_close(compiled.model(*given), expected)
