"""The checks of shapes that conftest.py installs notice a wrong one, at the first calls of a test and again later."""

import pytest

pytest.importorskip("beartype")

import jaxtyping
import torch

from nanoinfer.attention.dense import DenseAttention


def test_a_wrong_shape_and_a_wrong_type_are_noticed_in_the_package():
    q = torch.zeros(3, 2, 8)
    assert DenseAttention()(0, q, q, q).shape == q.shape
    for wrong in (torch.zeros(3, 2), torch.zeros(4, 2, 8), torch.zeros(3, 2, 8, dtype=torch.int64)):
        with pytest.raises(jaxtyping.TypeCheckError):
            DenseAttention()(0, q, q, wrong)
