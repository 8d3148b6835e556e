"""When a repetition ends an answer, and which ids n-grams ban. tests/sampling/test_stages.py has what bad words mask."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from nanoinfer import SamplingParams
from nanoinfer.engine.request import Request
from nanoinfer.engine.stopping import Stop
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.structured.words import NGrams, spellings_of, word_constraints
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.helpers.growing import grow

EOS, STOP_ID, OTHER = 2, 7, 5
TWICE = {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}


def constraints_of(**params):
    return tuple(word_constraints(SamplingParams(detokenize=False, **params), None, vocab_size=9))


def test_the_next_token_waits_for_this_one_if_a_constraint_forbids_ids_by_it():
    for params, waits in ({"bad_words": [[1]]}, True), ({"no_repeat_ngram_size": 2}, True), (TWICE, False), ({}, False):
        seq = Sequence("r", [1], SamplingParams(**params), 0, 9, constraints=constraints_of(**params))
        assert (seq.num_free_tokens == 0) == waits


def completing(token_ids, size):
    """The ids that would make the last `size` ids an n-gram that occurs already, found by trying all ids."""
    ngrams = {tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)}
    return {x for x in set(token_ids) if len(token_ids) >= size - 1 and (*token_ids[len(token_ids) - size + 1 :], x) in ngrams}


ENDS = [
    ([8, 9, 8], TWICE, None),
    ([8, 9, 8, 9], TWICE, Stop("repetition")),
    ([9, 8, 8], TWICE, Stop("repetition")),
    ([8, 9, 1, 8, 9, 1], TWICE, None),  # the pattern has three tokens
    ([STOP_ID], TWICE, None),  # the prompt ends with it, and does not count
    ([8, 8], TWICE | {"min_tokens": 3}, None),
    ([9, 8, 8], TWICE | {"min_tokens": 3}, Stop("repetition")),
    ([8, 8], {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 2}}, None),
    ([8, 9, 8, 9], {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}, None),
    ([8, 9, 1, 8, 9, 5, 5], TWICE, Stop("length")),  # the length before a repetition
    ([8, 8], {"repetition_detection": {}}, None),
]


@pytest.mark.parametrize(("output", "params", "expected"), ENDS, ids=str)
def test_a_pattern_in_a_row_ends_the_answer_last_of_all(output, params, expected):
    seq = Sequence("r", [OTHER, STOP_ID], SamplingParams(**params), 0, 9, {EOS}, constraints=constraints_of(**params))
    request = Request([seq], None, None)
    for token_id in output:
        grow(seq, token_id)
        stop = request.advance(seq, token_id)
    assert stop == expected


def test_bad_words_of_ids_are_in_the_vocabulary_and_those_of_text_need_a_tokenizer():
    assert constraints_of(bad_words=[[1, 8]])[0].words == ((1, 8),)
    with pytest.raises(InvalidValueError, match="bad_words has the token id 9"):
        constraints_of(bad_words=[[1, 9]])
    with pytest.raises(InvalidValueError, match="there is no tokenizer"):
        constraints_of(bad_words=["a"])


def test_ngrams_ban_what_followed_the_last_ids_before():
    for size, token_ids, banned in (
        (1, [5, 6, 5], {5, 6}),
        (2, [5, 6, 5, 4, 5], {4, 6}),
        (2, [5, 5, 5], {5}),
        (2, [5, 6], set()),
        (3, [1, 2, 3, 1, 2], {3}),
        (3, [1, 2], set()),  # a suffix, but nothing that it began
        (4, [1, 1, 1, 1], {1}),
        (9, [1], set()),
    ):
        assert NGrams(size).repeated(token_ids) == banned
        assert completing(token_ids, size) == banned  # the brute force that the test below trusts
    ngrams = NGrams(2)
    assert ngrams.repeated([5, 6, 5]) == {6}
    assert ngrams.repeated([5, 8, 5, 7, 5]) == {6, 7}  # 8 is where 6 was, and not read again


@settings(max_examples=60)
@given(
    token_ids=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    size=st.integers(1, 5),
    steps=st.lists(st.integers(1, 4), min_size=40, max_size=40),  # a step may find several new tokens
)
def test_ngrams_grown_in_steps_ban_what_a_search_finds_and_a_copy_begins_anew(token_ids, size, steps):
    ngrams, num = NGrams(size), 1
    while num <= len(token_ids):
        known = token_ids[:num]
        assert ngrams.repeated(known) == ngrams.copy().repeated(known) == completing(known, size)
        num += steps.pop()


def test_a_words_forms_are_all_that_the_tokenizer_writes_at_a_word_boundary():
    tokenizer = Tokenizer.load(BUNDLED / "tiny-qwen3")
    spellings = spellings_of(" kind", tokenizer)  # a space before it is not a part of the word
    assert spellings == spellings_of("kind", tokenizer)
    assert sorted(spellings) == sorted({tuple(tokenizer.encode(text)) for text in ("kind", " kind")})
    for before in ("a", "a\n", "was", '"', "Hello,"):
        for space in ("", " ") if not before.isalpha() else (" ",):
            ids = tokenizer.encode(before + space + "kind")
            assert any(tuple(ids[-len(spelling) :]) == spelling for spelling in spellings), before


def test_a_tokenizer_that_writes_a_space_before_every_text_has_a_spelling_without_it():
    """Llama's: "kind" is the token "_kind" at the start of a text and after a space, and "kind" after a line break."""
    vocab = {"<unk>": 0, "\u2581": 1, "\u2581kind": 2, "kind": 3, "\n": 4}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581?kind|\u2581|\n"), "isolated")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert spellings_of("kind", tokenizer) == [(2,), (1, 2), (3,)]
