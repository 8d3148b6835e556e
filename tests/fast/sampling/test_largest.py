"""The kernel for greedy rows chooses the sampler's tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.sampling.greedy import GreedyKernel
from nanoinfer.sampling.draw import argmax
from tests.helpers.sampling_rows import batch_of, sampling_by, sequence

SPECIAL = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")]


def kernel(dtype, vocab_size):
    try:
        return GreedyKernel(dtype, vocab_size)
    except UnsupportedError as error:
        pytest.skip(str(error))


def greedy_rows(num_rows, **params):
    return batch_of([sequence(**{"temperature": 0, **params}) for _ in range(num_rows)], 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1024, 1025, 5000])
def test_random_rows_with_ties(vocab_size, dtype):
    choose = kernel(dtype, vocab_size)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(-2, 3 if seed % 2 else 2000, (7, vocab_size), generator=generator).to(dtype)
        assert torch.equal(choose.argmax(logits), logits.argmax(dim=-1))


@given(st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_numbers_that_are_not_finite(dtype, data):
    vocab_size = data.draw(st.sampled_from([3, 16, 40, 1030]))
    row = [data.draw(st.sampled_from(SPECIAL))] * vocab_size
    for _ in range(data.draw(st.integers(0, 6))):
        row[data.draw(st.integers(0, vocab_size - 1))] = data.draw(st.sampled_from(SPECIAL))
    logits = torch.tensor([row, [1.0] * vocab_size]).to(dtype)
    expected = sampling_by()(logits.clone(), greedy_rows(2)).read()
    assert sampling_by(kernel(dtype, vocab_size))(logits, greedy_rows(2)).read() == expected


@pytest.mark.parametrize(
    ("params", "is_supported"),
    [
        ({}, True),
        ({"temperature": 0.5}, False),
        ({"logprobs": 0}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [3]}, False),
        ({"logits_processors": [lambda ids, row: row]}, False),
    ],
)
def test_rows_that_need_more_than_their_largest_logits_are_not_the_kernels(params, is_supported, monkeypatch):
    greedy, calls = kernel(torch.float32, 50), []
    monkeypatch.setattr(greedy, "argmax", lambda logits: calls.append(logits) or argmax(logits))
    logits, batch = torch.randn(2, 50), greedy_rows(2, **params)
    sampled = sampling_by(greedy)(logits.clone(), batch).read()
    assert len(calls) == is_supported
    assert sampled == sampling_by()(logits, batch).read()


@pytest.mark.parametrize(
    "logits", [torch.randn(3, 40).bfloat16(), torch.randn(3, 60), torch.randn(40, 3).T, torch.randn(3, 80)[:, ::2]]
)
def test_logits_of_another_dtype_width_or_layout_give_their_largest(logits):
    assert torch.equal(kernel(torch.float32, 40).argmax(logits), logits.float().argmax(dim=-1))


def test_another_dtype_is_refused():
    with pytest.raises(UnsupportedError, match="support float32, bfloat16 and float16, not float64"):
        GreedyKernel(torch.float64, 50)
