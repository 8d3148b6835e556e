"""The prefix index: keys that are digests, and the longest prefix that every part can serve, hand-checked."""

import struct
from hashlib import sha256

import pytest

from nanoinfer.scheduling.pool import NO_BLOCK, Pool
from nanoinfer.scheduling.prefix_index import IN_STORE, CacheGroup, PrefixIndex, first_reached

TOKENS = [5, 6, 7, 8, 9, 10, 11]  # three blocks of 2, and a token


def index_of(*windows, fingerprint=b""):
    return PrefixIndex([CacheGroup(window, Pool(8)) for window in windows], 2, fingerprint)


def enter(index, tokens, salt=None, part=0):
    """Put all full blocks of the tokens into a part, in new ids. Returns the ids."""
    blocks = list(index.further([], tokens, len(tokens), salt))
    ids = [index.groups[part].pool.take() for _ in blocks]
    assert index.enter(blocks, part, ids) == ids
    return ids


def test_a_key_is_the_digest_of_the_key_before_it_and_the_blocks_tokens():
    index = index_of(None)
    first, second = index.further([], TOKENS[:5], 5, None)
    root = sha256(b"").digest()
    assert first == (root + struct.pack("2i", 5, 6), sha256(root + struct.pack("2i", 5, 6)).digest())
    assert second[0] == first[1] + struct.pack("2i", 7, 8)
    assert list(index.further([first[1]], TOKENS[:5], 5, None)) == [second]


@pytest.mark.parametrize("change", [{"salt": "a"}, {"fingerprint": b"another model"}, {"tokens": [4, *TOKENS[1:]]}], ids=str)
def test_another_salt_fingerprint_or_first_token_changes_the_keys_of_all_blocks(change):
    def keys(salt=None, fingerprint=b"", tokens=TOKENS):
        return [key for _, key in index_of(None, fingerprint=fingerprint).further([], tokens, 6, salt)]

    assert not set(keys()) & set(keys(**change))


def test_a_prompt_finds_the_blocks_of_its_beginning_and_its_last_token_is_computed():
    index = index_of(None)
    ids = enter(index, TOKENS)
    assert index.match(TOKENS, None).tables == [ids]
    assert index.match(TOKENS[:6], None).tables == [ids[:2]]  # the third block ends with the last token
    assert index.match([*TOKENS[:4], 0, 0, 0], None).tables == [ids[:2]]
    assert len(index.match(TOKENS, "a")) == len(index.match([0, *TOKENS], None)) == 0
    assert list(index.match(TOKENS[:3], None)) == [(index.match(TOKENS, None).keys[0], ids[0])]


def test_a_part_with_a_window_needs_the_blocks_that_the_next_token_reaches():
    index = index_of(None, 3)
    ids = enter(index, TOKENS)
    assert len(index.match(TOKENS, None)) == 0  # the second part has none
    _, second, third = index.further([], TOKENS, 6, None)
    assert index.enter([second, third], 1, [6, 7]) == [6, 7]
    assert index.match(TOKENS, None).tables == [ids, [NO_BLOCK, NO_BLOCK, 7]]  # position 6 reaches positions 4 to 6
    index.remove(third[1], 1)
    assert index.match(TOKENS, None).tables == [ids[:2], [NO_BLOCK, 6]]  # position 4 reaches positions 2 to 4
    index.remove(second[1], 1)
    assert len(index.match(TOKENS, None)) == 0  # position 2 reaches the first block, which the part never had


def test_a_block_that_only_the_store_has_is_marked():
    index = index_of(None)
    [first] = enter(index, TOKENS[:2])
    keys = [key for _, key in index.further([], TOKENS, 6, None)]
    found = index.match(TOKENS, None, is_stored=lambda entry: entry == (keys[1], 0))
    assert found.tables == [[first, IN_STORE]]


def test_the_first_id_with_a_content_stays_and_a_removed_one_is_empty():
    index = index_of(None)
    [block] = enter(index, TOKENS[:2])
    [content_and_key] = index.further([], TOKENS[:2], 2, None)
    assert index.enter([content_and_key], 0, [index.groups[0].pool.take()]) == []
    assert index.match(TOKENS[:3], None).tables == [[block]]
    index.groups[0].pool.drop([block])
    index.remove(content_and_key[1], 0)
    assert not index.keys
    assert block in index.groups[0].pool.empty


@pytest.mark.parametrize(("position", "window", "expected"), [(9, None, 0), (2, 3, 0), (3, 3, 0), (4, 3, 1), (9, 1, 4)])
def test_the_first_block_that_a_query_reaches(position, window, expected):
    assert first_reached(position, window, block_size=2) == expected
