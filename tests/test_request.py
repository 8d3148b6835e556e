"""One request from outside: which of several reasons ends it, which text and ids stay, and what its stream shows."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detokenizer import BEYOND, EOS, IM_END, byte_tokenizer

from nanoinfer import SamplingParams
from nanoinfer.request import Request
from nanoinfer.sequence import Sequence
from nanoinfer.stopping import Stop

PROMPT = [1, 2, 3]


def request(*, room=99, tokenizer=True, **params):
    """A streaming request whose output may hold `room` tokens; EOS is the tokenizer's "<eos>"."""
    seq = Sequence("r7", PROMPT, SamplingParams(**params), 0, len(PROMPT) + room, frozenset([EOS]))
    return Request(seq, "a prompt", byte_tokenizer() if tokenizer else None, arrival_time=0.0, streaming=True)


def run(ids, **params):
    """Feed ids up to the one that ends the request. Returns (text, number of ids kept, finish_reason, stop_reason)."""
    one = request(**params)
    for token_id in ids:
        assert one.output is None
        one.advance(token_id)
        if one.output:
            break
    completion = one.output.outputs[0]
    assert completion.token_ids == list(ids[: len(completion.token_ids)])
    assert "".join(delta.text for delta in one.deltas) == completion.text
    return completion.text, len(completion.token_ids), completion.finish_reason, completion.stop_reason


SHOW_STOP = {"include_stop_str_in_output": True}
SHOW_SPECIAL = {"skip_special_tokens": False}


@pytest.mark.parametrize(
    ("ids", "params", "expected"),
    [
        # lengths and stop strings
        (b"abcd", {"room": 3}, ("abc", 3, "length", None)),
        (b"abcd", {"room": 3, "stop": "bc"}, ("a", 3, "stop", "bc")),  # on the last allowed token
        (b"abcd", {"room": 3, "stop": "cd"}, ("abc", 3, "length", None)),  # what was held is released
        (b"abcd", {"stop": ["cd", "b"]}, ("a", 2, "stop", "b")),
        (b"abcd", {"stop": "cd"} | SHOW_STOP, ("abcd", 4, "stop", "cd")),
        ([*b"x", 257], {"stop": "h"}, ("xt", 2, "stop", "h")),  # inside the token "the": the id stays whole
        ([*b"x", 257], {"stop": "h"} | SHOW_STOP, ("xth", 2, "stop", "h")),
        # EOS: stop_reason None; its text only with both include_stop_str_in_output and skip_special_tokens=False
        ([*b"ab", EOS], {}, ("ab", 3, "stop", None)),
        ([*b"ab", EOS], SHOW_SPECIAL, ("ab", 3, "stop", None)),
        ([*b"ab", EOS], SHOW_STOP, ("ab", 3, "stop", None)),
        ([*b"ab", EOS], SHOW_STOP | SHOW_SPECIAL, ("ab<eos>", 3, "stop", None)),
        ([*b"ab", EOS], {"room": 3}, ("ab", 3, "stop", None)),  # EOS before the length
        ([EOS], {}, ("", 1, "stop", None)),
        ([EOS, *b"ab"], {"ignore_eos": True, "room": 3}, ("ab", 3, "length", None)),
        ([EOS, *b"ab"], {"ignore_eos": True, "room": 3} | SHOW_SPECIAL, ("<eos>ab", 3, "length", None)),
        # a stop string does not look at the text of an id that stops, and does at that of one that does not
        ([*b"a", EOS], {"stop": "<eos>"} | SHOW_STOP | SHOW_SPECIAL, ("a<eos>", 2, "stop", None)),
        ([*b"a", EOS], {"stop": "eos", "ignore_eos": True} | SHOW_SPECIAL, ("a<", 2, "stop", "eos")),
        # stop ids: the id is the reason, ordinary tokens too
        (b"abc", {"stop_token_ids": [ord("c")]}, ("ab", 3, "stop", ord("c"))),
        (b"abc", {"stop_token_ids": [ord("c")]} | SHOW_STOP, ("abc", 3, "stop", ord("c"))),
        ([*b"a", IM_END], {"stop_token_ids": [IM_END]} | SHOW_STOP | SHOW_SPECIAL, ("a<|im_end|>", 2, "stop", IM_END)),
        ([*b"a", BEYOND[0]], {"stop_token_ids": [BEYOND[0]]} | SHOW_STOP, ("a", 2, "stop", BEYOND[0])),
        ([*b"a", EOS], {"stop_token_ids": [EOS]}, ("a", 2, "stop", None)),  # EOS before a stop id
        ([*b"a", EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, ("a", 2, "stop", EOS)),
        # half a character at the end is U+FFFD, as in decode
        ([*b"a", 0xE2, 0x82, 0xAC], {"room": 3}, ("a\ufffd", 3, "length", None)),
        ([*b"a", 0xE2, 0x82, EOS], {}, ("a\ufffd", 4, "stop", None)),
        ([*b"a", 0xE2, 0x82, EOS], SHOW_STOP | SHOW_SPECIAL, ("a\ufffd<eos>", 4, "stop", None)),
        # min_tokens: a stop string must complete in text after so many tokens
        (b"abab", {"stop": "ab", "min_tokens": 2}, ("ab", 4, "stop", "ab")),
        (b"abab", {"stop": "ab", "min_tokens": 1}, ("", 2, "stop", "ab")),  # begins before, completes after
        (b"abab", {"stop": "ab", "min_tokens": 4, "room": 4}, ("abab", 4, "length", None)),
        ([0xE2, 0x82, 0xAC], {"stop": "€", "min_tokens": 2}, ("", 3, "stop", "€")),
        # no text
        (b"abc", {"detokenize": False, "room": 2}, ("", 2, "length", None)),
        (b"abc", {"detokenize": False, "tokenizer": False, "room": 2}, ("", 2, "length", None)),
        ([*b"a", EOS], {"detokenize": False}, ("", 2, "stop", None)),
    ],
)
def test_the_request_ends_with_this_text_so_many_ids_and_this_reason(ids, params, expected):
    assert run(ids, **params) == expected


def test_a_stream_shows_each_id_once_and_text_as_soon_as_it_is_certain():
    one = request(stop="END")
    for token_id in [*b"aE", *"é".encode(), *b"bEND"]:
        one.advance(token_id)
    deltas = list(one.deltas)
    assert [delta.text for delta in deltas] == ["a", "", "", "Eé", "b", "", "", ""]
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in one.sequence.output_token_ids]
    assert [delta.output for delta in deltas] == [None] * 7 + [one.output]
    assert {delta.request_id for delta in deltas} == {"r7"}


def test_a_request_that_nobody_streams_keeps_no_deltas():
    seq = Sequence("r", PROMPT, SamplingParams(), 0, len(PROMPT) + 2)
    one = Request(seq, None, byte_tokenizer(), arrival_time=0.0)
    one.advance(ord("a"))
    one.advance(ord("b"))
    assert (one.output.outputs[0].text, list(one.deltas)) == ("ab", [])


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.one_of(st.sampled_from([*b"abab", 0xE2, 0x82, 0xAC, EOS, IM_END]), st.integers(0, IM_END)), max_size=12),
    stop=st.lists(st.sampled_from(["a", "ab", "ba", "€", "<eos>", "b\ufffd"]), max_size=2),
    include=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 4),
    aborted=st.booleans(),
)
def test_deltas_join_to_the_output_and_without_stops_to_decode(ids, stop, include, skip_special_tokens, min_tokens, aborted):
    one = request(
        room=99 if aborted else max(len(ids), 1),
        stop=stop,
        include_stop_str_in_output=include,
        skip_special_tokens=skip_special_tokens,
        min_tokens=min_tokens,
        ignore_eos=True,
    )
    for token_id in [*ids, ord("a")]:
        if not one.output:
            one.advance(token_id)
    if not one.output:
        one.end(Stop("abort"))
    completion = one.output.outputs[0]
    assert "".join(delta.text for delta in one.deltas) == completion.text
    assert [token_id for delta in one.deltas for token_id in delta.token_ids] == completion.token_ids
    assert [delta.output for delta in one.deltas][-1] is one.output
    whole = byte_tokenizer().decode(completion.token_ids, skip_special_tokens=skip_special_tokens)
    assert whole.startswith(completion.text)
    if completion.finish_reason != "stop":
        assert completion.text == whole


@pytest.mark.parametrize("stop", [Stop("abort"), Stop("error", error="no token is left")])
def test_a_request_ended_from_outside_keeps_its_ids_and_the_text_it_held(stop):
    one = request(stop=["END", "b\ufffd"], min_tokens=3)
    for token_id in [*b"aE", *b"b", 0xE2]:
        one.advance(token_id)
    shown = "".join(delta.text for delta in one.deltas)
    one.end(stop)
    completion = one.output.outputs[0]
    assert (shown, completion.text) == ("aE", "aEb\ufffd")  # nothing was drawn, so no stop string completes
    assert completion.token_ids == [*b"aEb", 0xE2]
    assert (completion.finish_reason, completion.stop_reason, completion.error) == (stop.finish_reason, None, stop.error)
    assert (one.deltas[-1].text, one.deltas[-1].token_ids, one.deltas[-1].output) == ("b\ufffd", [], one.output)


def test_a_request_ended_before_its_first_token_has_an_empty_output():
    one = request()
    one.end(Stop("error", error="the prompt is too long"))
    completion = one.output.outputs[0]
    assert (completion.text, completion.token_ids, completion.error) == ("", [], "the prompt is too long")
    assert (one.output.metrics.ttft, one.output.metrics.tpot) == (None, None)
    assert one.output.metrics.finished_time is not None


def test_the_output_tells_its_prompt_and_counts():
    one = request(room=1)
    one.sequence.num_preemptions, one.sequence.num_cached_tokens = 2, 16
    one.advance(ord("a"))
    assert (one.output.request_id, one.output.prompt, one.output.prompt_token_ids) == ("r7", "a prompt", PROMPT)
    assert one.output.finished
    metrics = one.output.metrics
    assert (metrics.num_output_tokens, metrics.num_preemptions, metrics.num_cached_tokens) == (1, 2, 16)


def test_ttft_runs_to_the_first_token_and_tpot_is_the_mean_of_the_gaps_after_it(monkeypatch):
    clock = iter([12.0, 99.0])  # read at the first token and at the end
    monkeypatch.setattr("nanoinfer.request.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seq = Sequence("r", PROMPT, SamplingParams(), 0, len(PROMPT) + 4)
    one = Request(seq, None, byte_tokenizer(), arrival_time=10.0)
    for token_id in b"abcd":
        one.advance(token_id)
    assert one.output.metrics.ttft == 2.0
    assert one.output.metrics.tpot == (99.0 - 12.0) / 3


def test_one_token_has_a_ttft_and_no_tpot():
    one = request(room=1)
    one.advance(ord("a"))
    assert one.output.metrics.ttft > 0
    assert one.output.metrics.tpot is None
