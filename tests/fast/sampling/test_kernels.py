"""The kernels find what a stable sort finds, and have the weights and tokens of the definition."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.sampling.kernels import draw_from_all, find_largest, has_kernels, use_exponentials
from nanoinfer.sampling import exponentials
from nanoinfer.sampling.draw import draw_from_weights, integer_weights
from nanoinfer.sampling.sampler import HeadRows
from nanoinfer.sampling.stages import apply_temperature
from tests.helpers.sampling_rows import BAD, INF, batch_of, random_logits, sampling_by, sequence

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")]


def largest_by_sort(logits, num):
    ids = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num].sort(dim=-1).values
    return logits.float().gather(-1, ids), ids


def greedy_rows(num_rows):
    return batch_of([sequence(temperature=0) for _ in range(num_rows)], 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_random_rows_with_ties(vocab_size, dtype):
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(-2, 3 if seed % 2 else 2000, (7, vocab_size), generator=generator).to(dtype)
        for num in {1, min(72, vocab_size), vocab_size}:
            for found, expected in zip(find_largest(logits, num), largest_by_sort(logits, num), strict=True):
                assert torch.equal(found, expected)


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_numbers_that_are_not_finite(dtype, data):
    vocab_size = data.draw(st.sampled_from([3, 16, 40, 1030]))
    row = [data.draw(st.sampled_from(SPECIAL))] * vocab_size
    for _ in range(data.draw(st.integers(0, 6))):
        row[data.draw(st.integers(0, vocab_size - 1))] = data.draw(st.sampled_from(SPECIAL))
    logits = torch.tensor([row, [1.0] * vocab_size]).to(dtype)
    values, ids = find_largest(logits, 3)
    if logits[0].isnan().any():
        assert values[0].isnan().all()
    else:
        assert torch.equal(ids, largest_by_sort(logits, 3)[1])
    expected = sampling_by()(logits.float(), greedy_rows(2)).read()
    assert sampling_by(FewLogits())(logits, greedy_rows(2)).read() == expected


@pytest.mark.parametrize("logits", [torch.randn(40, 30).T, torch.randn(3, 80)[:, ::2], torch.randn(1, 40).expand(3, 40)])
def test_rows_of_another_layout(logits):
    assert torch.equal(find_largest(logits, 5)[1], largest_by_sort(logits, 5)[1])


def test_another_dtype_has_no_kernel_and_gets_the_same_tokens():
    """Numbers that are equal in float32 tie."""
    logits = torch.ones(3, 40, dtype=torch.float64)
    logits[:, 7] += 1e-12
    assert not has_kernels("cpu", logits.dtype)
    rows = HeadRows(logits, lambda hidden: hidden)
    assert torch.equal(FewLogits().try_sample(rows, greedy_rows(3)), torch.zeros(3, dtype=torch.int64))


def assert_drawn(logits, batch):
    """The kernel's sums of weights and token ids must be those of the definition."""
    largest = logits.float().amax(dim=-1)
    token_ids, totals = draw_from_all(logits, largest, batch)
    weights = integer_weights(apply_temperature(logits.float(), batch))
    assert torch.equal(totals, weights.sum(dim=-1))
    assert torch.equal(token_ids, draw_from_weights(weights, batch.u))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "rounded to bf16", "few values", "constant"])
@pytest.mark.parametrize("vocab_size", [1, 17, 1025, 50_257])
def test_the_weights_and_the_draw_are_those_of_the_definition(vocab_size, kind, dtype):
    logits = random_logits(kind, 64, vocab_size).to(dtype)
    logits[::3, 1 : vocab_size // 2] = -INF
    temperatures = [1.0, 0.7, 1e-30, 3.0, 1e30]
    assert_drawn(logits, batch_of([sequence(seed, temperature=temperatures[seed % 5]) for seed in range(64)], vocab_size))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_has_the_weights_of_the_definition(bad, temperature):
    """They are 0. The sampler replaces its token."""
    logits = random_logits("random", 3, 2000)
    BAD[bad](logits[1])
    assert_drawn(logits, batch_of([sequence(seed, temperature=temperature) for seed in range(3)], 2000))


@pytest.mark.parametrize("u", [0.0, 0.5 - 2**-53, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("vocab_size", [2, 2048, 4096])
def test_a_threshold_at_the_edge_of_a_weight_or_a_block_is_drawn_exactly(vocab_size, u):
    """Equal weights: half of the sum ends a block of 1024 ids."""
    batch = batch_of([sequence(seed, temperature=1.0) for seed in range(3)], vocab_size)
    assert_drawn(torch.zeros(3, vocab_size), replace(batch, u=torch.full_like(batch.u, u)))


@pytest.mark.parametrize("bits", [32, 40])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 4096), (3, 5000)])
def test_the_kernel_computes_exponentials_as_torch_does(shape, bits, monkeypatch):
    monkeypatch.setattr(exponentials, "on_cpu", exponentials.by_torch)
    below = -torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 40
    for place, number in enumerate([0.0, -0.0, -INF, float("nan"), -1e-45, -3e38][: below.numel()]):
        below.view(-1)[place] = number
    expected = exponentials.on_cpu(below, exponentials.table(bits))
    use_exponentials()
    assert exponentials.on_cpu is not exponentials.by_torch
    assert torch.equal(exponentials.on_cpu(below, exponentials.table(bits)), expected)
    assert torch.equal(exponentials.on_cpu(below.T, exponentials.table(bits)), expected.T)
