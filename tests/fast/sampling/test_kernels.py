"""The kernels find what a stable sort finds, and draw the tokens of the stages unless their bounds leave it open."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.sampling.kernels import draw_from_all, find_largest, kernels_for
from nanoinfer.sampling.draw import draw_from_weights, integer_weights
from nanoinfer.sampling.routes import HeadRows
from nanoinfer.sampling.stages import apply_temperature
from tests.helpers.sampling_rows import batch_of, random_logits, sampling_by, sequence

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")]


def largest_by_kernel(logits, num):
    return find_largest(kernels_for("cpu", logits.dtype), logits, num)


def largest_by_sort(logits, num):
    ids = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num].sort(dim=-1).values
    return logits.float().gather(-1, ids), ids


def greedy_rows(num_rows):
    return batch_of([sequence(temperature=0) for _ in range(num_rows)], 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_random_rows_with_ties(vocab_size, dtype):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(-2, 3 if seed % 2 else 2000, (7, vocab_size), generator=generator).to(dtype)
        for num in {1, min(72, vocab_size), vocab_size}:
            for found, expected in zip(largest_by_kernel(logits, num), largest_by_sort(logits, num), strict=True):
                assert torch.equal(found, expected)


@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_numbers_that_are_not_finite(dtype, data):
    vocab_size = data.draw(st.sampled_from([3, 16, 40, 1030]))
    row = [data.draw(st.sampled_from(SPECIAL))] * vocab_size
    for _ in range(data.draw(st.integers(0, 6))):
        row[data.draw(st.integers(0, vocab_size - 1))] = data.draw(st.sampled_from(SPECIAL))
    logits = torch.tensor([row, [1.0] * vocab_size]).to(dtype)
    values, ids = largest_by_kernel(logits, 3)
    if logits[0].isnan().any():
        assert values[0].isnan().all()
    else:
        assert torch.equal(ids, largest_by_sort(logits, 3)[1])
    expected = sampling_by()(logits.float(), greedy_rows(2)).read()
    assert sampling_by(FewLogits())(logits, greedy_rows(2)).read() == expected


@pytest.mark.parametrize("logits", [torch.randn(40, 30).T, torch.randn(3, 80)[:, ::2], torch.randn(1, 40).expand(3, 40)])
def test_rows_of_another_layout(logits):
    assert torch.equal(largest_by_kernel(logits, 5)[1], largest_by_sort(logits, 5)[1])


def test_another_dtype_has_no_kernel_and_gets_the_same_tokens():
    """Numbers that are equal in float32 tie."""
    logits = torch.ones(3, 40, dtype=torch.float64)
    logits[:, 7] += 1e-12
    assert kernels_for("cpu", logits.dtype) is None
    rows = HeadRows(logits, lambda hidden: hidden)
    assert torch.equal(FewLogits().try_sample(rows, greedy_rows(3)), torch.zeros(3, dtype=torch.int64))


def drawn(logits, batch):
    """The kernel's token ids, and how many rows it leaves open. The others, and the bounds of the sums, must be right."""
    token_ids, totals, largest = draw_from_all(kernels_for("cpu", logits.dtype), logits, batch)
    weights = integer_weights(apply_temperature(logits.float(), batch))
    assert torch.equal(largest, logits.float().amax(dim=-1))
    total = weights.sum(dim=-1)
    assert ((totals[:, 0] <= total) & (total <= totals[:, 1])).all()
    assert (totals[:, 1] - totals[:, 0] <= total * 2.0**-19).all()
    is_open = token_ids < 0
    assert torch.equal(token_ids[~is_open], draw_from_weights(weights, batch.u)[~is_open])
    return is_open.sum().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "rounded to bf16", "few values", "constant"])
@pytest.mark.parametrize("vocab_size", [1, 17, 1025, 50_257])
def test_the_bounds_of_the_weights_hold_and_leave_few_rows_open(vocab_size, kind, dtype):
    logits = random_logits(kind, 64, vocab_size).to(dtype)
    temperatures = [1.0, 0.7, 1e-30, 3.0, 1e30]
    batch = batch_of([sequence(seed, temperature=temperatures[seed % 5]) for seed in range(64)], vocab_size)
    assert drawn(logits, batch) < 10


def test_a_threshold_at_the_edge_of_a_weight_is_left_open():
    """Two equal weights: the threshold is the first id of the second, or the last of the first."""
    batch = batch_of([sequence(seed, temperature=1.0) for seed in range(3)], 2)
    for u, num_open in ((0.5, 3), (0.5 - 1e-9, 3), (0.499, 0), (0.501, 0)):
        assert drawn(torch.zeros(3, 2), replace(batch, u=torch.full_like(batch.u, u))) == num_open
