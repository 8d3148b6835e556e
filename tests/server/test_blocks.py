"""Blocks: every split of an answer gives the same ones, in the order of the text, and their events add up to them."""

import random

import pytest

from nanoinfer.features.chat.parsing import ChatParser
from nanoinfer.server.blocks import Blocks

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ODD_CALL = '<tool_call>\n{"arguments": {"a": 1}, "name": "odd"}\n</tool_call>'
TWO_CALLS = '<tool_call>[{"name": "a", "parameters": {"x": 1}}, {"name": "b", "arguments": {}}, 5]</tool_call>'
TEXT = f"<think>\nWarm?\n</think>\n\nI look.\n{CALL}\n{CALL}\nAnd again.\n{ODD_CALL} \nDone, 1 < 2.\n"
EXPECTED = [
    ("reasoning", "", "Warm?"),
    ("content", "", "I look."),
    ("call", "weather", '{"city": "Oslo"}'),
    ("call", "weather", '{"city": "Oslo"}'),
    ("content", "", "And again."),
    ("call", "odd", '{"a": 1}'),
    ("content", "", "Done, 1 < 2.\n"),
]


def split(text, rng):
    """Random pieces of a text, some of which are empty."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def changes_of(blocks, pieces):
    return [change for i, piece in enumerate(pieces) for change in blocks.push(piece, "stop" if i == len(pieces) - 1 else None)]


def summary(blocks):
    return [(block.kind, block.name, block.text) for block in blocks.all]


@pytest.mark.parametrize("text", [TEXT, TEXT[25:], CALL, "", "\n", CALL[:50], f"{CALL}a", f"a{TWO_CALLS}b"])
def test_every_split_gives_the_same_blocks_each_of_which_begins_grows_and_ends_before_the_next(text):
    whole = Blocks(ChatParser())
    assert len(changes_of(whole, [text])) >= len(whole.all) * 2
    rng = random.Random(0)
    for _ in range(100):
        blocks, open_block, texts = Blocks(ChatParser()), None, []
        for change, block, new in changes_of(blocks, split(text, rng)):
            if change == "begins":
                assert open_block is None
                open_block = block
                texts.append("")
            assert open_block is block
            texts[-1] += new
            if change == "ends":
                open_block = None
        assert open_block is None
        assert texts == [block.text for block in blocks.all]
        assert summary(blocks) == summary(whole)


def test_blocks_are_in_the_order_of_the_text_and_reasoning_can_be_left_out():
    blocks, without = Blocks(ChatParser()), Blocks(ChatParser(), keeps_reasoning=False)
    changes_of(blocks, [TEXT])
    grown = [block.kind for change, block, _ in changes_of(without, list(TEXT)) if change == "grows"]
    assert grown.count("call") > 20, "arguments come in fragments"
    assert (summary(blocks), summary(without)) == (EXPECTED, EXPECTED[1:])
    assert [block.index for block in blocks.all] == list(range(len(blocks.all)))
    assert len({block.call_id for block in blocks.all if block.kind == "call"}) == 3


def test_every_call_of_a_list_is_a_block_and_the_first_alone_without_parallel_calls():
    calls = [("call", "a", '{"x": 1}'), ("call", "b", "{}")]
    for keeps_later, expected in ((True, calls), (False, calls[:1])):
        blocks = Blocks(ChatParser(parallel_tool_calls=keeps_later))
        changes_of(blocks, list(TWO_CALLS))
        assert summary(blocks) == [*expected, ("content", "", "5")]
