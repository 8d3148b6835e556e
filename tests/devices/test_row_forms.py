"""Row forms: calls have only numbers of rows that agree, and a kernel that adds in a different order is detected."""

import pytest
import torch
from torch import nn

from nanoinfer.devices.row_forms import COUNTS, ROW_FORMS, RowForm, cancelling_rows, find_row_form, form_called

NUM_IN, NUM_OUT = 96, 40


def product_of(weight, kernel_of, calls=None):
    """x @ weight.T in fp32, rounded to weight's dtype: added up from the left, or by kernel 1 from the right."""

    def product(x, residual):
        if calls is not None:
            calls.append(len(x))
        terms = x.float().unsqueeze(1) * weight.float()  # [rows, out, in]
        kernels = [kernel_of(len(x), row) for row in range(len(x))]
        flipped = torch.where(torch.tensor(kernels).view(-1, 1, 1) == 1, terms.flip(2), terms)
        out = torch.zeros(len(x), len(weight))
        for term in flipped.unbind(2):
            out += term
        out = out.to(x.dtype)
        return out if residual is None else residual + out

    return product


KERNELS = {
    "as it is": lambda num_rows, row: 0,
    "at least 2 rows": lambda num_rows, row: num_rows == 1,
    "at least 16 rows": lambda num_rows, row: num_rows < 16,
    "multiples of 16 rows": lambda num_rows, row: num_rows % 16 > 0,
    "multiples of 64 rows": lambda num_rows, row: num_rows % 64 > 0,
    "64 rows at a time": lambda num_rows, row: num_rows != 64,
    "16 rows at a time": lambda num_rows, row: num_rows != 16 and row % 2,
    None: lambda num_rows, row: row % 3 == 1,  # by the row's place
}


@pytest.fixture
def weight(dtype):
    return (torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("expected", KERNELS)
def test_the_cheapest_form_that_holds_is_found_and_keeps_to_its_numbers_of_rows(expected, dtype, weight):
    probes = cancelling_rows(weight, None, has_residual=False)
    calls = []
    product = product_of(weight, KERNELS[expected], calls)
    form = find_row_form(product, probes, tuple(count for count in COUNTS if count <= 128))
    assert (form and form.name) == expected
    if form is None:
        return
    x = torch.randn(200, NUM_IN, generator=torch.Generator().manual_seed(2)).to(dtype)
    together = form.compute(product, x, None)
    assert together.shape == (200, NUM_OUT)
    calls.clear()
    for num_rows in (1, 2, 7, 15, 16, 17, 63, 64, 65, 130):
        assert torch.equal(form.compute(product, x[-num_rows:].contiguous(), None), together[-num_rows:])
    assert all(form.calls(num_rows) for num_rows in calls)


@torch.inference_mode()
@dtypes
def test_cancelling_rows_show_an_order_of_addition_that_random_rows_hide(dtype, weight):
    """A twin: random rows in bf16 do not show a different order."""
    kernels = [product_of(weight, lambda num_rows, row, kernel=kernel: kernel) for kernel in (0, 1)]
    probes = cancelling_rows(weight, None, has_residual=False)
    assert not torch.equal(*(kernel(probes.x, None) for kernel in kernels))
    random = torch.randn(8, NUM_IN, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(*(kernel(random, None) for kernel in kernels)) == (dtype is torch.bfloat16)


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("has_residual", [False, True])
def test_products_bias_and_residual_cancel_in_one_output(has_residual, dtype, weight):
    bias = torch.randn(NUM_OUT).to(dtype)
    probes = cancelling_rows(weight, bias, has_residual=has_residual)
    exact = probes.x.double() @ weight.double().T + bias.double()
    if probes.residual is not None:
        exact += probes.residual.double()
    assert (exact.abs().amin(dim=1) < 1e-8 * exact.abs().amax(dim=1)).all()


@torch.inference_mode()
def test_a_weight_that_is_not_a_number_does_not_count_as_a_different_order():
    weight = torch.randn(NUM_OUT, NUM_IN)
    weight[3] = float("nan")
    probes = cancelling_rows(weight, None, has_residual=False)
    form = find_row_form(product_of(weight, KERNELS["at least 2 rows"]), probes, (1, 2, 3, 16))
    assert form is not None
    assert form.name == "at least 2 rows"


@pytest.mark.parametrize("form", ROW_FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("residual", [False, True])
def test_a_form_computes_what_the_layer_does(form, residual):
    torch.manual_seed(0)
    linear = nn.Linear(8, 5)
    with torch.inference_mode():
        for num_rows in (0, 1, 2, 15, 16, 40, 600):
            x, beside = torch.randn(num_rows, 8), torch.randn(num_rows, 5)
            out = form.compute(lambda x, r: linear(x) + (0 if r is None else r), x, beside if residual else None)
            torch.testing.assert_close(out, linear(x) + (beside if residual else 0))


def test_a_form_is_found_by_its_name_and_an_unknown_name_is_every_row_at_once():
    assert form_called("at least 2 rows", 64) == RowForm("at least 2 rows", least=2, most=64)
    assert form_called("16 rows at a time", 64).most == 16
    assert form_called("rows depend on each other", 64).calls(10**6)
