"""When a sequence ends: the order of the checks on ids, and stop strings against an oracle reading one character at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.engine.stopping import Answer, KeptStopStrings, Stop, StopStrings
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tokenization.detokenizer import NoText
from tests.helpers.growing import grow

EOS, EOS_TOO, STOP_ID, OTHER = 3, 4, 7, 9


@pytest.mark.parametrize(
    ("newest", "num_left", "params", "expected"),
    [
        (OTHER, 1, {}, None),
        (OTHER, 0, {}, Stop("length")),
        (EOS, 1, {}, Stop("stop")),
        (EOS_TOO, 1, {}, Stop("stop")),  # every EOS id counts
        (EOS, 0, {}, Stop("stop")),  # EOS before the length
        (STOP_ID, 1, {}, None),  # nobody asked for it
        (STOP_ID, 1, {"stop_token_ids": [STOP_ID]}, Stop("stop", STOP_ID)),
        (STOP_ID, 0, {"stop_token_ids": [STOP_ID]}, Stop("stop", STOP_ID)),  # a stop id before the length
        (EOS, 0, {"stop_token_ids": [EOS]}, Stop("stop")),  # EOS before a stop id
        (EOS, 1, {"ignore_eos": True}, None),
        (EOS, 0, {"ignore_eos": True}, Stop("length")),
        (EOS, 1, {"ignore_eos": True, "stop_token_ids": [EOS]}, Stop("stop", EOS)),
        (STOP_ID, 1, {"ignore_eos": True, "stop_token_ids": [STOP_ID]}, Stop("stop", STOP_ID)),
    ],
)
def test_eos_goes_before_stop_ids_and_both_before_the_length(newest, num_left, params, expected):
    seq = Sequence("r", [EOS, STOP_ID], SamplingParams(**params), 0, 4 + num_left, frozenset([EOS, EOS_TOO]))
    grow(seq, OTHER, newest)
    assert Answer(seq, NoText()).check_id(newest, examine=True) == expected


def stream(stops, pieces, *, include=False, num_unexamined=0):
    """Push the pieces up to the one that completes a stop string. Returns the match, the releases and the StopStrings."""
    text, releases = (KeptStopStrings if include else StopStrings)(stops), []
    for i, piece in enumerate(pieces):
        if matched := text.push(piece, examine=i >= num_unexamined):
            return matched, [*releases, text.release(everything=True)], text
        releases.append(text.release())
    return None, [*releases, text.release(everything=True)], text


@pytest.mark.parametrize(
    ("stops", "pieces", "matched", "expected"),
    [
        ([], ["abc", "def"], None, "abcdef"),
        (["END"], [], None, ""),
        (["END"], ["the E", "N", "D of"], "END", "the "),
        (["END"], ["END"], "END", ""),
        (["END"], ["EN", "X", "EN"], None, "ENXEN"),  # a beginning held at the end is released
        (["END"], ["E", "E", "N", "D"], "END", "E"),
        (["END"], ["end", "En", "eND"], None, "endEneND"),  # capitals count
        (["\n\n"], ["a\n", "b\n\n\n"], "\n\n", "a\nb"),
        (["aab"], ["a", "a", "a", "b"], "aab", "a"),
        (["abcd", "bc"], ["abcd"], "bc", "a"),  # the shorter completes first, though it begins later
        (["bcd", "abcd"], ["xabcd"], "bcd", "xa"),  # both complete together: the first in the list
        (["abcd", "bcd"], ["xabcd"], "abcd", "x"),
        (["abc", "ab"], ["abc"], "ab", ""),  # ab completes before abc, whatever the order
        (["zz", "yy"], ["a yy zz"], "yy", "a "),
        (["ab", "ab"], ["xab"], "ab", "x"),
        (["🙂🙃"], ["🙂🙂", "🙃"], "🙂🙃", "🙂"),
        (["much longer than all of it"], ["much longer", " than"], None, "much longer than"),
        (["he", "the"], ["the"], "he", "t"),
        (["e", "th"], ["the"], "th", ""),
        (["a\ufffd"], ["a", "\ufffd"], "a\ufffd", ""),
        (["cba", "ab", "b"], ["xa", "bc"], "ab", "x"),
    ],
)
def test_the_stop_string_that_completes_first_cuts_the_text(stops, pieces, matched, expected):
    found, releases, text = stream(stops, pieces)
    assert (found, text.text, "".join(releases)) == (matched, expected, expected)
    found, releases, text = stream(stops, pieces, include=True)
    expected += matched or ""
    assert (found, text.text, "".join(releases)) == (matched, expected, expected)


@pytest.mark.parametrize(
    ("stops", "pieces", "num_unexamined", "matched", "expected"),
    [
        (["END"], ["END", "x"], 1, None, "ENDx"),  # completed before: not looked at, not later either
        (["END"], ["EN", "D"], 1, "END", ""),  # begins before, completes after
        (["END"], ["aEN", "DEND"], 1, "END", "a"),
        (["END"], ["END", "x", "END"], 1, "END", "ENDx"),
        (["aa"], ["aa", "a"], 1, "aa", "a"),
        (["bc", "abcd"], ["abc", "d"], 1, "abcd", ""),
    ],
)
def test_a_match_must_complete_in_a_piece_that_is_examined(stops, pieces, num_unexamined, matched, expected):
    found, releases, text = stream(stops, pieces, num_unexamined=num_unexamined)
    assert (found, text.text, "".join(releases)) == (matched, expected, expected)


def read_character_by_character(stops, pieces, include, num_unexamined):
    """The oracle: after each character, does the whole text end with a stop string?"""
    text = ""
    for i, piece in enumerate(pieces):
        for character in piece:
            text += character
            for stop in stops:
                if i >= num_unexamined and text.endswith(stop):
                    return stop, text if include else text[: -len(stop)]
    return None, text


few_letters = st.text("ab", max_size=6)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(few_letters, max_size=8),
    include=st.booleans(),
    num_unexamined=st.integers(0, 3),
)
def test_the_text_is_the_oracles_and_what_was_shown_is_never_taken_back(stops, pieces, include, num_unexamined):
    matched, releases, text = stream(stops, pieces, include=include, num_unexamined=num_unexamined)
    assert (matched, text.text) == read_character_by_character(stops, pieces, include, num_unexamined)
    assert "".join(releases) == text.text  # so no release held more than the text at the end


@settings(max_examples=250, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    pieces=st.lists(st.tuples(few_letters, st.booleans(), st.booleans()), max_size=10),
)
def test_what_is_held_is_the_longest_proper_beginning_whatever_was_examined_and_released(stops, pieces):
    text = StopStrings(stops)
    for piece, is_examined, is_released in pieces:
        if text.push(piece, examine=is_examined):
            return
        if is_released:
            text.release()
            sizes = (n for stop in stops for n in range(len(stop)) if text.text.endswith(stop[:n]))
            assert len(text.held) == max(sizes, default=0)


class CountedStop(str):
    """A stop string that counts its comparisons with an end of the text."""

    num_compared = 0

    def startswith(self, prefix, *place):
        CountedStop.num_compared += 1
        return super().startswith(prefix, *place)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * 600 + "b"], ("a" * 400 + "c") * 2),  # everything is held, until nothing is
        (["ab" * 300 + "c"], "ab" * 200 + "abb" * 100),
        ([" " + "a" * n + "!" for n in range(1, 30)], " a" * 200),
    ],
    ids=["one_letter", "a_period", "many"],
)
def test_a_place_of_the_text_that_has_failed_is_not_compared_again(stops, text):
    CountedStop.num_compared = 0
    strings, num_pieces = StopStrings([*map(CountedStop, stops)]), 0
    for start in range(0, len(text), 3):
        assert strings.push(text[start : start + 3]) is None
        strings.release()
        num_pieces += 1
    assert 0 < CountedStop.num_compared <= len(stops) * (len(text) + num_pieces)


def test_the_oracle_notices_a_search_that_looks_at_the_newest_piece_alone():
    class Forgetful(StopStrings):
        def push(self, piece, *, examine=True):
            before, self.text = self.text, ""
            matched = super().push(piece, examine=examine)
            self.text = before + self.text
            return matched

    for stops, pieces in [(["ab"], ["a", "b"]), (["aa", "b"], ["ba", "a"])]:
        text = Forgetful(stops)
        found = next((matched for piece in pieces if (matched := text.push(piece))), None)
        agrees = (found, text.text) == read_character_by_character(stops, pieces, False, 0)
        assert agrees is (pieces[0] == "ba")  # a match inside one piece is found; one over two pieces is not
