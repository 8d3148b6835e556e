"""The prefix index of several cache groups: the longest prefix that every group can serve, hand-checked."""

import pytest

from nanoinfer.features.hybrid.prefix_index import IN_STORE, CacheGroup, HybridIndex, first_reached
from nanoinfer.features.hybrid.tables import NO_BLOCK
from nanoinfer.scheduling.pool import Pool

TOKENS = [5, 6, 7, 8, 9, 10, 11]  # three blocks of 2, and a token


def index_of(*windows):
    return HybridIndex([CacheGroup(window, Pool(8)) for window in windows], 2)


def enter(index, tokens):
    """Put all full blocks of the tokens into the first group, in new ids. Returns the ids."""
    blocks = list(index.further([], tokens, len(tokens), None))
    ids = [index.pool.take() for _ in blocks]
    assert index.enter(blocks, ids) == ids
    return ids


def test_another_fingerprint_changes_the_keys_of_all_blocks():
    one, other = index_of(None), index_of(None)
    other.fingerprint = b"another model"
    keys, others = ({key for _, key in index.further([], TOKENS, 6, None)} for index in (one, other))
    assert not keys & others


def test_a_part_with_a_window_needs_the_blocks_that_the_next_token_reaches():
    index = index_of(None, 3)
    ids = enter(index, TOKENS)
    assert len(index.match(TOKENS, None)) == 0  # the second part has none
    _, second, third = index.further([], TOKENS, 6, None)
    assert index.enter([second, third], [6, 7], 1) == [6, 7]
    assert index.match(TOKENS, None).tables == [ids, [NO_BLOCK, NO_BLOCK, 7]]  # position 6 reaches positions 4 to 6
    index.remove_from(1, third[1])
    assert index.match(TOKENS, None).tables == [ids[:2], [NO_BLOCK, 6]]  # position 4 reaches positions 2 to 4
    index.remove_from(1, second[1])
    assert len(index.match(TOKENS, None)) == 0  # position 2 reaches the first block, which the part never had


def test_a_block_that_only_the_store_has_is_marked():
    index = index_of(None)
    [first] = enter(index, TOKENS[:2])
    keys = [key for _, key in index.further([], TOKENS, 6, None)]
    found = index.match(TOKENS, None, is_stored=lambda entry: entry == (keys[1], 0))
    assert found.tables == [[first, IN_STORE]]


@pytest.mark.parametrize(("position", "window", "expected"), [(9, None, 0), (2, 3, 0), (3, 3, 0), (4, 3, 1), (9, 1, 4)])
def test_the_first_block_that_a_query_reaches(position, window, expected):
    assert first_reached(position, window, block_size=2) == expected
