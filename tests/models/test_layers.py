"""The layers that families share, by hand and against torch. test_parity.py compares whole models with transformers."""

import math

import pytest
import torch
import torch.nn.functional as F

from nanoinfer.models.layers import RMSNorm, RotaryEmbedding, apply_rotary, sigmoid
from nanoinfer.models.rope import RopeConfig


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_the_mean_of_a_norm_in_half_precision_is_computed_in_fp32():
    norm, x = RMSNorm(16, eps=1e-6), rows(5, 16, dtype=torch.float16) * 300  # whose squares float16 does not hold
    norm.weight.data = torch.ones(16, dtype=torch.float16)
    torch.testing.assert_close(norm(x).float(), F.rms_norm(x.float(), (16,)), atol=2e-3, rtol=2e-3)


def test_a_row_of_sigmoid_has_the_same_bits_in_any_batch():
    x = rows(33, 7) * 8
    torch.testing.assert_close(sigmoid(x), x.sigmoid())
    assert all(torch.equal(sigmoid(x[i : i + 1]), sigmoid(x)[i : i + 1]) for i in range(33))


def rotated(x, positions, theta=10_000.0):
    cos, sin = RotaryEmbedding(x.shape[-1], RopeConfig(theta=theta))(torch.tensor(positions), x.dtype)
    return apply_rotary(x, cos, sin)


def test_a_quarter_turn_by_hand():
    cos, sin = torch.tensor([0.0, 0.0]).view(1, 1, 2), torch.tensor([1.0, 1.0]).view(1, 1, 2)
    assert apply_rotary(torch.tensor([[[3.0, 4.0]]]), cos, sin).tolist() == [[[-4.0, 3.0]]]


def test_a_score_depends_on_the_distance_alone():
    q, k = rows(1, 1, 16), rows(2, 1, 16)[1:]

    def score(i, j):
        return (rotated(q, [i]) * rotated(k, [j])).sum().item()

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-4)


def test_angles_are_computed_in_fp32_whatever_the_dtype():
    rope = RotaryEmbedding(16, RopeConfig()).bfloat16()
    rope.inv_freq = RotaryEmbedding(16, RopeConfig()).inv_freq
    cos, _ = rope(torch.tensor([10_000]), torch.bfloat16)
    assert cos.dtype == torch.bfloat16
    assert cos[0, 0, 0].item() == pytest.approx(math.cos(10_000), abs=0.01)
