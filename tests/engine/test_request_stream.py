"""When the event loop gets new deltas: after every step while that is cheap, after several when it is not."""

import pytest

from nanoinfer.engine.request_stream import DELIVERY_SHARE, MAX_HOLD_SECONDS, DeliveryPacer


def delivered_steps(step_seconds, cost, num_steps=40):
    """The steps after which a delivery begins, each of which costs so many seconds, and the longest that a delta was held."""
    pacer, found, oldest, longest = DeliveryPacer(), [], None, 0.0
    for step in range(num_steps):
        now = 100 + step * step_seconds
        oldest = now if oldest is None else oldest
        if pacer.is_due(now):
            pacer.begin(now)
            pacer.finish(cost)
            found.append(step)
            oldest, longest = None, max(longest, now - oldest)
    return found, longest


def test_cheap_deliveries_are_made_after_every_step():
    found, _ = delivered_steps(0.01, 0.9 * 0.01 * DELIVERY_SHARE)
    assert found == list(range(40))


@pytest.mark.parametrize("num_merged", [2, 3])
def test_expensive_ones_keep_to_their_share_of_the_time(num_merged):
    found, _ = delivered_steps(0.01, (num_merged - 0.5) * 0.01 * DELIVERY_SHARE)
    assert found[1:] == list(range(found[1], 40, num_merged))


@pytest.mark.parametrize("step_seconds", [0.004, 0.02, 0.045, 0.3])
def test_nothing_is_held_for_too_long_however_expensive_it_is(step_seconds):
    found, longest = delivered_steps(step_seconds, cost=10.0)
    assert len(found) > 1
    assert longest <= MAX_HOLD_SECONDS
    assert (found == list(range(40))) == (step_seconds > MAX_HOLD_SECONDS)


def test_a_delivery_that_has_not_begun_takes_the_next_steps_with_it():
    pacer = DeliveryPacer()
    assert [pacer.is_due(100.0), pacer.is_due(100.1)] == [True, False]
    pacer.begin(100.2)
    assert pacer.is_due(100.3)


def test_the_event_loop_is_told_when_a_long_step_holds_deltas_back():
    pacer = DeliveryPacer()
    pacer.begin(100.0)
    pacer.finish(10.0)
    assert pacer.seconds_left(100.0) == MAX_HOLD_SECONDS  # nothing is held
    for now in (100.01, 100.02):
        pacer.is_due(now)
    pacer.begin(100.02)
    assert not pacer.is_due(100.03)
    assert pacer.seconds_left(100.05) == pytest.approx(MAX_HOLD_SECONDS - 0.02)
