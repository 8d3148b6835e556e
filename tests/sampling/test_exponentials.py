"""Exponentials against Python's exp, and log-probabilities against torch's in float64."""

import math

import pytest
import torch

from nanoinfer.features.logprobs.token_logprobs import log_softmax
from nanoinfer.sampling.exponentials import exponentials


@pytest.mark.parametrize("bits", [32, 40])
def test_exponentials_are_close_to_pythons(bits):
    below = torch.linspace(0, -20, 501)
    for number, found in zip(below.tolist(), exponentials(below.unsqueeze(0), bits)[0].tolist(), strict=True):
        assert abs(found - math.exp(number) * 2.0**bits) <= max(found * 2.0**-23, 1)


def test_dropped_tokens_and_numbers_that_are_too_small_are_zero():
    logits = torch.tensor([[5.0, -math.inf, -90.0, math.nan], [-math.inf] * 4])
    assert exponentials(logits[:, :3], 32).tolist() == [[2**32, 0, 0], [0, 0, 0]]
    assert exponentials(logits, 32).tolist() == [[0] * 4] * 2


def test_log_probabilities_are_close_to_those_in_float64():
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)) * 4
    assert torch.allclose(log_softmax(logits).double(), logits.double().log_softmax(dim=-1), rtol=2e-7, atol=2e-6)
