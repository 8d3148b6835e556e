"""The grammar's probabilities: hand-checked on four sentences, and conserved on real stories."""

import math
import random
import string

import pytest

from nanoinfer_lab import stories
from nanoinfer_lab.stories.grammar import Grammar

FIRST, SECOND = 1 / (1 + math.sqrt(0.5)), math.sqrt(0.5) / (1 + math.sqrt(0.5))  # weights 1 and 1 / sqrt(2), normalized
RULES = {
    "start": """
        {Who} saw {a thing}.
        {Who} and {friend} ran, and {who} fell.
    """,
    "thing": "owl | big {color} bee",
    "color": "red|blue",
}
CAST = {
    "who": lambda m: ("ann", "bob", "cleo"),
    "friend": lambda m: [name for name in ("ann", "bob", "cleo") if name != m["who"]],
}


@pytest.fixture
def grammar():
    return Grammar(RULES, CAST)


def test_the_probability_of_a_text_is_the_product_of_its_choices(grammar):
    for text, probability in (
        ("Ann saw an owl.", FIRST / 3 * FIRST),
        ("Bob saw a big red bee.", FIRST / 3 * SECOND * FIRST),
        ("Bob saw a big blue bee.", FIRST / 3 * SECOND * SECOND),
        ("Cleo and bob ran, and cleo fell.", SECOND / 3 / 2),
    ):
        reading = grammar.read(text, "start")
        assert math.exp(reading.log_prob) == math.exp(reading.log_prob_of_beginning) == pytest.approx(probability)
        assert (reading.is_complete, reading.num_chars, reading.expected) == (True, len(text), ())


def test_the_probabilities_of_all_texts_sum_to_one_and_are_the_frequencies_of_writing(grammar):
    rng = random.Random(0)
    num_texts = 5_000
    written = [grammar.write(rng, "start") for _ in range(num_texts)]
    texts = set(written)
    assert len(texts) == 3 * 3 + 3 * 2
    assert sum(math.exp(grammar.read(text, "start").log_prob) for text in texts) == pytest.approx(1)
    for text in texts:
        p = math.exp(grammar.read(text, "start").log_prob)
        # 6 standard deviations. The seed is fixed, and another one would fail with a probability below 1e-7.
        assert abs(written.count(text) / num_texts - p) < 6 * math.sqrt(p * (1 - p) / num_texts)


def test_a_text_with_two_derivations_has_the_sum_of_both():
    twice = Grammar({"start": "a{end}|{end}", "end": "b|ab"}, {})
    texts = ["ab", "aab", "b"]
    probabilities = [math.exp(twice.read(text, "start").log_prob) for text in texts]
    assert probabilities == pytest.approx([FIRST * FIRST + SECOND * SECOND, FIRST * SECOND, SECOND * FIRST])


@pytest.mark.parametrize(
    ("text", "num_chars", "expected"),
    [
        ("Ann saw a owl.", 10, ("big",)),
        ("Ann saw the owl.", 8, ("a", "an")),
        ("Ann saw an owl", 14, ("owl.",)),
        ("Ann saw an owl. ", 15, ("owl.",)),
        ("Ann and ann ran, and ann fell.", 8, ("bob", "cleo")),
        ("Dora ran.", 0, ("Ann", "Bob", "Cleo")),
    ],
)
def test_a_reading_finds_where_a_text_leaves_the_grammar_and_what_was_expected(grammar, text, num_chars, expected):
    reading = grammar.read(text, "start")
    assert (reading.is_complete, reading.num_chars, reading.expected) == (False, num_chars, expected)


def test_a_beginning_has_the_probability_of_all_that_can_follow(grammar):
    assert math.exp(grammar.read("Ann saw", "start").log_prob_of_beginning) == pytest.approx(FIRST / 3)
    assert math.exp(grammar.read("Ann saw an", "start").log_prob_of_beginning) == pytest.approx(FIRST / 3 * FIRST)
    assert grammar.read("Ann sat", "start").log_prob_of_beginning == -math.inf
    assert grammar.read("", "start").log_prob_of_beginning == pytest.approx(0)
    assert grammar.read("Cleo and bob ran, and ", "start").memory == {"who": "cleo", "friend": "bob"}


def test_what_is_set_beforehand_is_neither_drawn_nor_counted(grammar):
    known = {"who": "bob"}
    assert grammar.write(random.Random(1), "start", known).startswith("Bob")
    assert math.exp(grammar.read("Bob saw an owl.", "start", known).log_prob) == pytest.approx(FIRST * FIRST)
    assert grammar.read("Ann saw an owl.", "start", known).expected == ("Bob",)
    assert known == {"who": "bob"}


def test_an_invalid_rule_is_refused():
    for rules, message in (
        ({"start": "{who} met {a villain}"}, "rule 'start': blank 'villain' is not a rule and not in the cast"),
        ({"start": "{pet.his}", "pet": "cat"}, "rule 'start': blank 'pet' is not in the cast, as an attribute needs"),
        ({"start": "{who ran"}, "rule 'start': '{who ran' has a brace that is not part of a blank"),
        ({"start": " | "}, "rule 'start' has no alternative"),
    ):
        with pytest.raises(ValueError, match=message):
            Grammar(rules, CAST)


@pytest.mark.parametrize("seed", range(2))
def test_after_any_beginning_of_a_story_the_probabilities_of_the_next_characters_sum_to_one(seed):
    rng = random.Random(seed)
    story = stories.write(rng)
    beginning = story[: rng.randrange(len(story) + 1)]
    before = stories.read(beginning)
    nexts = [stories.read(beginning + letter).log_prob_of_beginning for letter in string.ascii_letters + ' .,!?":']
    total = math.exp(before.log_prob) + sum(math.exp(log_prob) for log_prob in nexts)
    assert total == pytest.approx(math.exp(before.log_prob_of_beginning))
