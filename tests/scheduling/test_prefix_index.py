"""The prefix index: keys that are digests, and the longest prefix in memory, hand-checked."""

import struct
from hashlib import sha256

import pytest

from nanoinfer.scheduling.pool import Pool
from nanoinfer.scheduling.prefix_index import PrefixIndex

TOKENS = [5, 6, 7, 8, 9, 10, 11]  # three blocks of 2, and a token


def new_index():
    return PrefixIndex(Pool(8), 2)


def enter(index, tokens, salt=None):
    """Put all full blocks of the tokens into new blocks. Returns the blocks."""
    blocks = list(index.further([], tokens, len(tokens), salt))
    ids = [index.pool.take() for _ in blocks]
    assert index.enter(blocks, ids) == ids
    return ids


def found(index, tokens, salt=None):
    return [index.ids[key] for key in index.chain(tokens, salt)]


def test_a_key_is_the_digest_of_the_key_before_it_and_the_blocks_tokens():
    index = new_index()
    first, second = index.further([], TOKENS[:5], 5, None)
    root = sha256(b"").digest()
    assert first == (root + struct.pack("2i", 5, 6), sha256(root + struct.pack("2i", 5, 6)).digest())
    assert second[0] == first[1] + struct.pack("2i", 7, 8)
    assert list(index.further([first[1]], TOKENS[:5], 5, None)) == [second]


@pytest.mark.parametrize("change", [{"salt": "a"}, {"tokens": [4, *TOKENS[1:]]}], ids=str)
def test_another_salt_or_first_token_changes_the_keys_of_all_blocks(change):
    def keys(salt=None, tokens=TOKENS):
        return [key for _, key in new_index().further([], tokens, 6, salt)]

    assert not set(keys()) & set(keys(**change))


def test_a_prompt_finds_the_blocks_of_its_beginning_and_its_last_token_is_computed():
    index = new_index()
    ids = enter(index, TOKENS)
    assert found(index, TOKENS) == ids
    assert found(index, TOKENS[:6]) == ids[:2]  # the third block ends with the last token
    assert found(index, [*TOKENS[:4], 0, 0, 0]) == ids[:2]
    assert found(index, TOKENS, "a") == found(index, [0, *TOKENS]) == []
    assert found(index, TOKENS[:3]) == ids[:1]


def test_the_first_id_with_a_content_stays_and_a_removed_one_is_empty():
    index = new_index()
    [block] = enter(index, TOKENS[:2])
    [content_and_key] = index.further([], TOKENS[:2], 2, None)
    assert index.enter([content_and_key], [index.pool.take()]) == []
    assert found(index, TOKENS[:3]) == [block]
    index.pool.drop([block])
    index.remove(block)
    assert not index.keys
    assert not index.ids
    assert block in index.pool.empty
