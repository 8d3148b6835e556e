"""Linear layers on a CPU: the same numbers within their rounding, the same bits in any batch."""

import pytest
import torch
from torch import nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.models.cpu_dense import DenseLinear, dense_classes
from nanoinfer.models.cpu_linear import LinearOptimizer, PackedLinear, PlainLinear

KINDS = {  # arguments of an optimised layer, and what it computes of the plain layer's output and a residual
    "plain": ({}, lambda out, residual: out),
    "silu": ({"activation": "silu"}, lambda out, residual: nn.functional.silu(out)),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda out, residual: nn.functional.gelu(out, approximate="tanh")),
    "residual": ({"adds_residual": True}, lambda out, residual: residual + out),
}


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_nearly_the_plain_layers_numbers(dtype, tolerance, kind, bias):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    options, definition = KINDS[kind]
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    x, residual = torch.randn(70, 64).to(dtype), torch.randn(70, 96).to(dtype)
    given = (x, residual) if kind == "residual" else (x,)
    linears = LinearOptimizer(dense_classes())
    optimised = linears.optimize(layer, **options)
    together = optimised(*given)
    for start, stop in ((0, 1), (69, 70), (3, 5), (0, 16), (10, 43)) if linears.report().are_rows_independent else ():
        assert torch.equal(optimised(*(x[start:stop] for x in given)), together[start:stop])
    expected = definition(layer.float()(x.float()), residual.float())
    for out in (together, PackedLinear(layer.to(dtype), **options)(*given)):
        assert (out.float() - expected).abs().max() < tolerance


def dense(layer, **options):
    try:
        return DenseLinear(layer, **options)
    except UnsupportedError as error:  # such as bfloat16 on an older processor
        pytest.skip(str(error))


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (34, 1), (2, 131), (770, 49)])
def test_the_kernel_gives_a_row_the_same_bits_in_any_batch_and_with_any_number_of_threads(num_in, num_out, dtype, kind):
    torch.manual_seed(0)
    options, definition = KINDS[kind]
    layer = nn.Linear(num_in, num_out).to(dtype)
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t())  # as a transposed checkpoint has it
    x, residual = torch.randn(200, num_in).to(dtype), torch.randn(200, num_out).to(dtype)
    x[70] = 50 * x[70]  # far along the activation's axis
    given = (x, residual) if kind == "residual" else (x,)
    kernel = dense(layer, **options)
    together = kernel(*given)
    expected = definition(layer.float()(x.float()), residual.float())
    torch.testing.assert_close(together.float(), expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2**-8)
    for num_rows in (1, 2, 7, 8, 9, 24, 25, 97):
        assert torch.equal(kernel(*(tensor[70 : 70 + num_rows] for tensor in given)), together[70 : 70 + num_rows])
    torch.set_num_threads(3)
    try:
        assert torch.equal(kernel(*given), together)
    finally:
        torch.set_num_threads(1)


def test_the_kernel_refuses_what_it_cannot_compute():
    with pytest.raises(UnsupportedError, match="support float32 and bfloat16, not float16"):
        DenseLinear(nn.Linear(4, 4).half())
    with pytest.raises(UnsupportedError, match=r"weight is in torch.float32, got rows in torch.bfloat16"):
        DenseLinear(nn.Linear(4, 4))(torch.zeros(1, 4, dtype=torch.bfloat16))


@torch.inference_mode()
def test_the_fastest_class_whose_rows_agree_is_chosen(monkeypatch):
    """The first class is kept unless another is clearly faster. A plain layer serves where no other has a form."""
    monkeypatch.setattr("nanoinfer.models.cpu_linear.verdict", lambda check, measure: measure())
    for name, seconds, bad in (
        ("first", {}, None), ("second", {"first": 2.0}, None), ("first", {"first": 1.2}, None), ("second", {}, "first"),
        ("plain", {}, "both"),
    ):  # fmt: skip
        classes = {
            key: type(key, (PlainLinear,) if key == "plain" else (PackedLinear,), {}) for key in ("first", "second", "plain")
        }
        monkeypatch.setattr(
            "nanoinfer.models.cpu_linear._seconds", lambda layer, _, seconds=seconds: seconds.get(type(layer).__name__, 1.0)
        )
        for key in {"both": ("first", "second")}.get(bad, (bad,) if bad else ()):
            classes[key].find_form = lambda self, linear: None
        layer = LinearOptimizer(classes).optimize(nn.Linear(512, 1024))  # small ones are not timed
        assert type(layer).__name__ == name, (seconds, bad)
