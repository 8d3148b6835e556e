"""How many drafts pay, by the seconds that steps took."""

import itertools
from types import SimpleNamespace

import pytest

from nanoinfer.features.drafts.speculator import StepCost


def cost_of(seconds_of):
    cost = StepCost()
    for rows in (1, 9) * 30:
        cost.observe(rows, 1, seconds_of(rows))
    return cost


@pytest.mark.parametrize(("acceptance", "expected"), [(1.0, 8), (0.5, 4), (0.04, 0)])
def test_the_last_draft_must_give_more_than_its_time_gives_otherwise(acceptance, expected):
    """A step takes 20 ms and gives one token. A row takes 1 ms more, in which 0.05 tokens come: 0.5 ** 4 > 0.05 > 0.5 ** 5."""
    assert cost_of(lambda rows: 0.015 + 0.001 * rows).num_that_pay(acceptance, 8) == expected


def test_the_time_of_proposing_counts_where_drafts_are_not_cheap(monkeypatch):
    """20 ms for a step and 10 ms for its drafts give three tokens, so 0.6 tokens come in the 6 ms of a draft and its row."""
    clock = itertools.count(step=0.01)
    monkeypatch.setattr("nanoinfer.features.drafts.speculator.time.perf_counter", lambda: next(clock))
    cost, proposer = StepCost(), SimpleNamespace(propose=lambda sequences, limits: [[5, 6]])
    for rows in (1, 9) * 40:
        cost.time_proposal(proposer, [], [])
        cost.observe(rows, 3, 0.015 + 0.001 * rows)
    assert cost.num_that_pay(0.8, 8) == 2


def test_before_anything_was_measured_everything_is_tried():
    assert StepCost().num_that_pay(0.8, 8) == 8


def test_where_a_step_costs_in_proportion_to_its_rows_uncertain_drafts_do_not_pay_until_the_verdict_has_faded():
    cost = cost_of(lambda rows: 0.01 * rows)
    assert cost.num_that_pay(0.2, 8) == 0
    for _ in range(2000):
        cost.observe(1, 1, 0.01)
    assert cost.num_that_pay(0.2, 8) > 0


def test_the_cost_of_a_row_is_the_slope_which_a_step_that_compiles_something_does_not_decide():
    cost = cost_of(lambda rows: 0.02 + 0.001 * rows)
    assert cost.seconds_per_row == pytest.approx(0.001)
    cost.observe(9, 1, 30.0)
    assert cost.seconds_per_row < 0.01
