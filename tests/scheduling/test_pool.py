"""A Pool's ids: each is held, reusable or empty, and the order in which free ones are taken."""

from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.scheduling.pool import Pool


def test_ids_are_taken_in_order_and_a_dropped_one_without_content_is_taken_first():
    pool = Pool(3)
    assert [pool.take(), pool.take()] == [0, 1]
    pool.drop([0])
    assert list(pool.empty) == [0, 2]
    assert pool.take() == 0


def test_a_dropped_id_with_content_can_be_held_again_until_its_content_is_forgotten():
    pool = Pool(2)
    first, second = pool.take(), pool.take()
    pool.contents[first] = pool.contents[second] = b"content"
    pool.drop([second, first])
    assert list(pool.reusable) == [second, first]  # the one that was dropped first is the least recently used
    assert not pool.empty
    pool.hold([second])
    assert list(pool.reusable) == [first]
    pool.forget(first)
    assert (list(pool.empty), list(pool.reusable), pool.contents[first]) == ([first], [], b"")
    pool.forget(second)  # which is held
    assert list(pool.empty) == [first]


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop", "fill", "forget"]), st.integers(0, 4)), max_size=60))
def test_every_id_is_held_or_reusable_or_empty_whatever_is_done(actions):
    pool = Pool(5)
    for action, chosen in actions:
        if action == "take" and pool.empty:
            pool.take()
        elif action == "hold" and (pool.ref_counts[chosen] or chosen in pool.reusable):
            pool.hold([chosen])
        elif action == "drop" and pool.ref_counts[chosen]:
            pool.drop([chosen])
        elif action == "fill" and pool.ref_counts[chosen]:
            pool.contents[chosen] = b"content"
        elif action == "forget" and pool.contents[chosen]:
            pool.forget(chosen)
        held = [i for i in range(5) if pool.ref_counts[i]]
        assert sorted([*held, *pool.reusable, *pool.empty]) == list(range(5))
        assert all(pool.contents[i] for i in pool.reusable)
        assert not any(pool.contents[i] for i in pool.empty)
        assert pool.num_free == 5 - len(held)
