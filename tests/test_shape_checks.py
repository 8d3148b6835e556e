"""The checks of shapes that conftest.py installs notice a wrong one, at the first calls of a test and again later."""

import pytest

pytest.importorskip("beartype")

import jaxtyping
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.dense import DenseAttention
from tests.helpers import shape_checks


def test_a_wrong_shape_and_a_wrong_type_are_noticed_in_the_package():
    q = torch.zeros(3, 2, 8)
    assert DenseAttention()(0, q, q, q).shape == q.shape
    for wrong in (torch.zeros(3, 2), torch.zeros(4, 2, 8), torch.zeros(3, 2, 8, dtype=torch.int64)):
        with pytest.raises(jaxtyping.TypeCheckError):
            DenseAttention()(0, q, q, wrong)


def test_of_each_function_the_first_calls_of_a_test_are_checked_and_then_one_in_every_few():
    @shape_checks.check_some_calls(typechecker=beartype)
    def doubled(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return torch.cat([x, x])

    def checked_calls(num_calls):
        found = []
        for number in range(num_calls):
            try:
                assert len(doubled(torch.zeros(2))) == 4
            except jaxtyping.TypeCheckError:
                found.append(number)
        return found

    assert checked_calls(130) == [*range(8), 61, 122]
    shape_checks.start_test()
    assert checked_calls(9) == [*range(8)]
