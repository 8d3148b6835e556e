"""One request from outside: which of several reasons ends it, which text and ids stay, and what its stream shows."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.engine.request import Request
from nanoinfer.engine.stopping import Stop
from nanoinfer.features.logprobs.token_logprobs import RowReport, TokenLogprobs
from nanoinfer.scheduling.sequence import Constraint, Sequence
from tests.helpers.byte_tokenizer import BEYOND, EOS, IM_END, byte_tokenizer
from tests.helpers.growing import grow

PROMPT = [1, 2, 3]


def request(*, room=99, tokenizer=True, **params):
    """A streaming request whose output may hold `room` tokens; EOS is the tokenizer's "<eos>"."""
    seq = Sequence("r7", PROMPT, SamplingParams(**params), 0, len(PROMPT) + room, frozenset([EOS]))
    return Request([seq], "a prompt", byte_tokenizer() if tokenizer else None, streaming=True)


def advance(request, seq, token_id, logprobs=None):
    """What the engine does with a sampled id."""
    grow(seq, token_id)
    return request.advance(seq, token_id, logprobs)


def run(ids, **params):
    """Feed ids up to the one that ends the request. Returns (text, number of ids kept, finish_reason, stop_reason)."""
    one = request(**params)
    for token_id in ids:
        assert one.output is None
        advance(one, one.sequences[0], token_id)
        if one.output:
            break
    assert one.output, "the ids have not ended it"
    completion = one.output.outputs[0]
    assert completion.token_ids == list(ids[: len(completion.token_ids)])
    assert "".join(delta.text for delta in one.deltas) == completion.text
    return completion.text, len(completion.token_ids), completion.finish_reason, completion.stop_reason


SHOW_STOP = {"include_stop_str_in_output": True}
SHOW_SPECIAL = {"skip_special_tokens": False}


EMOJI = [258, 259]  # 😀 in two tokens of two bytes each

STOP_STRINGS = [
    # where it stands
    (b"abcd", {"stop": "bc"}, ("a", 3, "stop", "bc")),
    (b"abcd", {"stop": "bc"} | SHOW_STOP, ("abc", 3, "stop", "bc")),
    ([257], {"stop": "the"}, ("", 1, "stop", "the")),  # the whole output in one token
    # beginnings that repeat. test_stopping.py has more of text alone
    (b"aaab", {"stop": "aab"}, ("a", 4, "stop", "aab")),
    (b"aE", {"stop": "END", "room": 2}, ("aE", 2, "length", None)),  # what was held is released
    # inside tokens, and over several
    ([*b"x", 257], {"stop": "h"}, ("xt", 2, "stop", "h")),  # inside the token "the": the id stays whole
    ([*b"x", 257], {"stop": "h"} | SHOW_STOP, ("xth", 2, "stop", "h")),
    ([257, 257], {"stop": "eth"}, ("th", 2, "stop", "eth")),
    ([*b"x", 256, *b"e"], {"stop": "the"}, ("x", 3, "stop", "the")),
    # several: the one that completes first, then the first in the list
    ([257], {"stop": ["he", "the"]}, ("t", 1, "stop", "he")),  # both end in one token, at one place
    ([257], {"stop": ["the", "he"]}, ("", 1, "stop", "the")),
    ([257], {"stop": ["the", "th"]} | SHOW_STOP, ("th", 1, "stop", "th")),
    # on the last allowed token: "stop", not "length"
    (b"abc", {"stop": "bc", "room": 3} | SHOW_STOP, ("abc", 3, "stop", "bc")),
    # the prompt is never searched
    (b"ab", {"stop": "\x03", "room": 2}, ("ab", 2, "length", None)),
    # characters of several bytes, over several tokens
    (EMOJI, {"stop": "😀"}, ("", 2, "stop", "😀")),
    ([*b"a", *EMOJI, *b"b"], {"stop": "a😀b"} | SHOW_STOP, ("a😀b", 4, "stop", "a😀b")),
    ([*EMOJI, 258, 0x98, 0x81], {"stop": "😁"}, ("😀", 5, "stop", "😁")),
    ([*EMOJI, *b"b"], {"stop": "\ufffd", "room": 3}, ("😀b", 3, "length", None)),  # half of it is no text yet
    ([*b"a", 258], {"stop": "\ufffd", "room": 2}, ("a", 2, "length", None)),  # nor at the end
    ([262], {"stop": "a", "room": 1}, ("", 1, "stop", "a")),  # the text beside half a character is searched at the end
    ([260, 261], {"stop": "x"}, ("佬", 2, "stop", "x")),  # in a token whose first byte ends a character
    ([262, 263], {"stop": "a"}, ("", 2, "stop", "a")),  # "a" comes with half of "€", and waits for the other half
    # min_tokens: it must complete in text after so many tokens
    (b"abab", {"stop": "ab", "min_tokens": 2}, ("ab", 4, "stop", "ab")),
    (b"abab", {"stop": "ab", "min_tokens": 1}, ("", 2, "stop", "ab")),  # begins before, completes after
    ([*b"aab", EOS], {"stop": "aab", "min_tokens": 3}, ("aab", 4, "stop", None)),  # too early; then EOS
    ([0xE2, 0x82, 0xAC], {"stop": "€", "min_tokens": 2}, ("", 3, "stop", "€")),
    # beside EOS, other special tokens and stop ids
    ([*b"aE", EOS], {"stop": "END"}, ("aE", 3, "stop", None)),
    ([*b"a", EOS], {"stop": "<eos>"} | SHOW_SPECIAL, ("a", 2, "stop", None)),  # EOS goes first, and its text is dropped
    # where its text is kept, it is searched
    ([*b"a", EOS], {"stop": "<eos>"} | SHOW_STOP | SHOW_SPECIAL, ("a<eos>", 2, "stop", "<eos>")),
    ([*b"x", 257], {"stop": "th", "stop_token_ids": [257]} | SHOW_STOP, ("xth", 2, "stop", "th")),
    # a stop string that is a special token: its id, where its text is left out
    ([*b"a", IM_END, *b"b"], {"stop": "<|im_end|>"}, ("a", 2, "stop", "<|im_end|>")),
    ([*b"a", IM_END, *b"b"], {"stop": "<|im_end|>", "room": 2}, ("a", 2, "stop", "<|im_end|>")),
    ([*b"a", IM_END, *b"b"], {"stop": "<|im_end|>", "min_tokens": 2, "room": 3}, ("ab", 3, "length", None)),
    ([*b"a", IM_END], {"stop": "<|im_end|>"} | SHOW_SPECIAL | SHOW_STOP, ("a<|im_end|>", 2, "stop", "<|im_end|>")),
    ([*b"a", EOS], {"stop": "<eos>"}, ("a", 2, "stop", None)),
    ([*b"a", EOS, *b"b"], {"stop": "<eos>", "ignore_eos": True}, ("a", 2, "stop", "<eos>")),
    ([*b"aE", IM_END], {"stop": ["END", "<|im_end|>"]}, ("aE", 3, "stop", "<|im_end|>")),  # what was held is released
    (b"a<|im_end|>", {"stop": "<|im_end|>"}, ("a", 11, "stop", "<|im_end|>")),  # and its text, in characters
    ([*b"a", EOS, *b"b"], {"stop": "ab", "ignore_eos": True}, ("", 3, "stop", "ab")),  # over a token without text
    ([*b"a", EOS, *b"b"], {"stop": "s>b", "ignore_eos": True} | SHOW_SPECIAL, ("a<eo", 3, "stop", "s>b")),
    ([*b"a", BEYOND[0], *b"b"], {"stop": "ab"}, ("", 3, "stop", "ab")),
    (b"abc", {"stop": "bc", "stop_token_ids": [ord("c")]}, ("ab", 3, "stop", ord("c"))),  # a stop id goes first, too
]
IDS_AND_LENGTHS = [
    (b"abcd", {"room": 3}, ("abc", 3, "length", None)),
    # EOS: stop_reason None; its text only with both include_stop_str_in_output and skip_special_tokens=False
    ([*b"ab", EOS], {}, ("ab", 3, "stop", None)),
    ([*b"ab", EOS], SHOW_STOP | SHOW_SPECIAL, ("ab<eos>", 3, "stop", None)),
    ([EOS, *b"ab"], {"ignore_eos": True, "room": 3} | SHOW_SPECIAL, ("<eos>ab", 3, "length", None)),
    # stop ids: the id is the reason, ordinary tokens too
    (b"abc", {"stop_token_ids": [ord("c")]}, ("ab", 3, "stop", ord("c"))),
    (b"abc", {"stop_token_ids": [ord("c")]} | SHOW_STOP, ("abc", 3, "stop", ord("c"))),
    ([*b"a", IM_END], {"stop_token_ids": [IM_END]} | SHOW_STOP | SHOW_SPECIAL, ("a<|im_end|>", 2, "stop", IM_END)),
    ([*b"a", BEYOND[0]], {"stop_token_ids": [BEYOND[0]]} | SHOW_STOP, ("a", 2, "stop", BEYOND[0])),
    ([*b"a", EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, ("a", 2, "stop", EOS)),
    # half a character at the end is left out, its ids are not
    ([*b"a", 0xE2, 0x82, 0xAC], {"room": 3}, ("a", 3, "length", None)),
    ([262], {"room": 1}, ("a", 1, "length", None)),  # "a" comes with half of "€", and stays
    ([*b"a", 0xE2, 0x82, EOS], {}, ("a", 4, "stop", None)),
    ([*b"a", 0xE2, 0x82, EOS], SHOW_STOP | SHOW_SPECIAL, ("a\ufffd<eos>", 4, "stop", None)),
    # no text
    (b"abc", {"detokenize": False, "tokenizer": False, "room": 2}, ("", 2, "length", None)),
]


@pytest.mark.parametrize(("ids", "params", "expected"), STOP_STRINGS + IDS_AND_LENGTHS)
def test_the_request_ends_with_this_text_so_many_ids_and_this_reason(ids, params, expected):
    assert run(ids, **params) == expected


def test_a_stream_shows_each_id_once_and_text_as_soon_as_it_is_certain():
    one = request(stop="END")
    for token_id in [*b"aE", *"é".encode(), *b"bEND"]:
        advance(one, one.sequences[0], token_id)
    deltas = list(one.deltas)
    assert [delta.text for delta in deltas] == ["a", "", "", "Eé", "b", "", "", ""]
    assert [delta.token_ids for delta in deltas] == [[token_id] for token_id in one.sequences[0].output_token_ids]
    assert [delta.output for delta in deltas] == [None] * 7 + [one.output]
    assert {delta.request_id for delta in deltas} == {"r7"}


def expected_end(ids, *, room, stop, include, skip_special_tokens, min_tokens, ignore_eos, stop_token_ids):
    """The oracle: decode everything anew for each token, and look at every end of it.

    Returns what `run` does, and for each token but the last the text that is certain and how much of it a stop string may yet
    cut. A request that does not end is aborted.
    """

    def decode(ids):
        return byte_tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens)

    certain, told = "", []
    for count, token_id in enumerate(ids, start=1):
        is_eos = token_id == EOS and not ignore_eos
        ends, reason = is_eos or token_id in stop_token_ids, None if is_eos else token_id
        is_special_stop = skip_special_tokens and token_id == EOS and "<eos>" in stop and count > min_tokens
        if is_special_stop and not ends:
            ends, reason = True, "<eos>"
        before, now = certain, decode(ids[: count if include or not ends else count - 1])
        if ends or count == room:
            certain = now.rstrip("\ufffd")
        elif not now.endswith("\ufffd"):
            certain = now
        if count > min_tokens:
            for end in range(len(before) + 1, len(certain) + 1):
                for text in stop:
                    if certain[:end].endswith(text):
                        return (certain[: end if include else end - len(text)], count, "stop", text), told
        if ends:
            return (certain, count, "stop", reason), told
        if count == room:
            return (certain, count, "length", None), told
        tails = [certain[start:] for start in range(len(certain))]
        told.append((certain, max((len(t) for t in tails if any(s.startswith(t) and s != t for s in stop)), default=0)))
    return (decode(ids).rstrip("\ufffd"), len(ids), "abort", None), told


@settings(max_examples=250, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.sampled_from([*b"abab", 0xE2, 0x82, 0xAC, 262, 263, EOS, IM_END]), st.integers(0, IM_END)), max_size=12
    ),
    room=st.integers(1, 12),
    stop=st.lists(st.sampled_from(["a", "ab", "ba", "aab", "€", "a€b", "<eos>", "b\ufffd"]), max_size=3),
    include=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.sampled_from([ord("b"), IM_END, 263]), max_size=1),
)
def test_a_request_ends_as_the_oracle_says_and_its_stream_takes_nothing_back(ids, **params):
    renamed = {name: value for name, value in params.items() if name != "include"}
    one = request(include_stop_str_in_output=params["include"], **renamed)
    (*expected, finish_reason, stop_reason), told = expected_end(ids, **params)
    longest = max(map(len, params["stop"]), default=1)
    for token_id, (certain, num_at_risk) in zip(ids, told, strict=False):
        advance(one, one.sequences[0], token_id)
        shown = "".join(delta.text for delta in one.deltas)
        assert certain.startswith(shown)
        assert len(certain) - max(longest - 1, 0) <= len(shown) <= len(certain) - num_at_risk
        assert one.output is None
    if finish_reason == "abort":
        one.finish(Stop("abort"))
    else:
        advance(one, one.sequences[0], ids[len(told)])
    completion = one.output.outputs[0]
    assert [completion.text, len(completion.token_ids)] == expected
    assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
    assert completion.token_ids == ids[: len(completion.token_ids)]
    assert "".join(delta.text for delta in one.deltas) == completion.text  # so nothing shown was taken back
    assert [token_id for delta in one.deltas for token_id in delta.token_ids] == completion.token_ids
    assert [delta.output for delta in one.deltas] == [None] * (len(one.deltas) - 1) + [one.output]


class Complete(Constraint):
    """Nothing can follow its first token."""

    is_complete = True


def test_the_token_that_completes_a_constraint_without_eos_stays_in_the_text():
    one = Request([Sequence("r", PROMPT, SamplingParams(), 0, 99, constraints=(Complete(),))], None, byte_tokenizer())
    advance(one, one.sequences[0], ord("x"))
    assert (one.output.outputs[0].text, one.output.outputs[0].finish_reason) == ("x", "stop")


FOX = [256, 0xF0, 0x9F, 0x98, 0x80, 257]  # th😀the


def test_the_text_of_a_piece_of_a_character_is_what_it_adds():
    """For the id that was drawn, and for others in its place: each position has two of them."""
    others = [0x80, ord("x"), 0x80, 259, 261, 0xFF]
    one = Request([Sequence("r", PROMPT, SamplingParams(logprobs=1), 0, len(PROMPT) + len(FOX))], None, byte_tokenizer())
    for token_id, other in zip(FOX, others, strict=True):
        advance(one, one.sequences[0], token_id, RowReport(TokenLogprobs([token_id, other], [-1.0, -2.0], [1, 2])))
    texts = [[entry.decoded_token for entry in position.values()] for position in one.output.outputs[0].logprobs]
    assert texts == [["th", ""], ["", "x"], ["", ""], ["", "😀"], ["😀", "😬x"], ["the", ""]]
    assert "".join(text for text, _ in texts) == one.output.outputs[0].text == "th😀the"


def test_the_joined_stream_notices_a_stream_that_holds_nothing_back(monkeypatch):
    monkeypatch.setattr("nanoinfer.engine.stopping.StopStrings._num_held", lambda text: 0)
    with pytest.raises(AssertionError):
        run(b"abcd", stop="bc")
    assert run(b"abcd", stop="b") == ("a", 2, "stop", "b")  # one character needs no waiting


@pytest.mark.parametrize("stop", [Stop("abort"), Stop("error", error="no token is left")])
def test_a_request_ended_from_outside_keeps_its_ids_and_the_text_it_held(stop):
    one = request(stop=["END", "b€"], min_tokens=3)
    for token_id in [*b"aE", *b"b", 0xE2]:
        advance(one, one.sequences[0], token_id)
    shown = "".join(delta.text for delta in one.deltas)
    one.finish(stop)
    completion = one.output.outputs[0]
    assert (shown, completion.text) == ("aE", "aEb")
    assert completion.token_ids == [*b"aEb", 0xE2]
    assert (completion.finish_reason, completion.stop_reason, completion.error) == (stop.finish_reason, None, stop.error)
    assert (one.deltas[-1].text, one.deltas[-1].token_ids, one.deltas[-1].output) == ("b", [], one.output)


def two_answers(**params):
    params = SamplingParams(n=2, **params)
    sequences = [Sequence("r7", PROMPT, params, i, len(PROMPT) + 4, frozenset([EOS]), index=i) for i in range(2)]
    return Request(sequences, None, byte_tokenizer()), *sequences


def test_a_request_of_two_answers_has_an_output_when_the_second_has_ended():
    one, first, second = two_answers(stop="bc")
    for token_id in b"xbc":
        stop = advance(one, second, token_id)
        assert advance(one, first, ord("a")) is one.output is None
    assert stop == Stop("stop", "bc")
    assert advance(one, first, ord("a")) == Stop("length")
    assert [answer.index for answer in one.output.outputs] == [0, 1]
    assert [answer.text for answer in one.output.outputs] == ["aaaa", "x"]
    assert [answer.token_ids for answer in one.output.outputs] == [[*b"aaaa"], [*b"xbc"]]
    assert [answer.finish_reason for answer in one.output.outputs] == ["length", "stop"]
    assert one.output.metrics.num_output_tokens == 7


def test_an_error_ends_one_answer_and_an_abort_all_that_still_run():
    one, first, second = two_answers()
    advance(one, first, ord("a"))
    advance(one, second, ord("b"))
    one.finish(Stop("error", error="no token is left"), second)
    assert one.output is None
    advance(one, first, ord("c"))
    one.finish(Stop("abort"))
    assert [(answer.text, answer.finish_reason) for answer in one.output.outputs] == [("ac", "abort"), ("b", "error")]
    assert [answer.error for answer in one.output.outputs] == [None, "no token is left"]


def test_the_output_tells_its_prompt_and_counts():
    one = request(room=1)
    one.metrics.num_preemptions, one.metrics.num_cached_tokens = 2, 16
    advance(one, one.sequences[0], ord("a"))
    assert (one.output.request_id, one.output.prompt, one.output.prompt_token_ids) == ("r7", "a prompt", PROMPT)
    assert one.output.finished
    metrics = one.output.metrics
    assert (metrics.num_output_tokens, metrics.num_preemptions, metrics.num_cached_tokens) == (1, 2, 16)


def test_ttft_runs_to_the_first_token_and_tpot_is_the_mean_of_the_gaps_after_it(monkeypatch):
    clock = iter([12.0, 99.0])  # read at the first token and at the end
    monkeypatch.setattr("nanoinfer.engine.request.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seq = Sequence("r", PROMPT, SamplingParams(), 0, len(PROMPT) + 4, arrival_time=10.0)
    one = Request([seq], None, byte_tokenizer())
    for token_id in b"abcd":
        advance(one, one.sequences[0], token_id)
    assert one.output.metrics.ttft == 2.0
    assert one.output.metrics.tpot == (99.0 - 12.0) / 3


@pytest.mark.parametrize(("ids", "reason"), [([5, 6, EOS], "stop"), ([5, 6, 7, 9], "stop"), ([5, 6, 7, 8], "length")])
def test_an_answer_that_nothing_reads_before_its_end_ends_as_one_that_is_read(ids, reason):
    outputs = []
    for streaming in (False, True):
        seq = Sequence("r7", PROMPT, SamplingParams(detokenize=False, stop_token_ids=[9]), 0, len(PROMPT) + 4, frozenset([EOS]))
        one = Request([seq], None, byte_tokenizer(), streaming=streaming)
        stops = [advance(one, seq, token_id) for token_id in ids]
        assert [stop is None for stop in stops] == [True] * (len(ids) - 1) + [False]
        assert one.metrics.first_token_time is not None
        assert bool(one.deltas) == streaming
        outputs.append(one.output.outputs)
    assert outputs[0] == outputs[1]
    assert outputs[0][0].finish_reason == reason
