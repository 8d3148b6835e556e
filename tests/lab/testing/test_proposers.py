"""check_proposer passes proposers that keep the invariants, and names the invariant that a wrong one violates."""

import itertools

import pytest

from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.features.drafts.ngram import NGramProposer
from nanoinfer_lab.testing import check_proposer
from tests.helpers.growing import grow

pytestmark = pytest.mark.slow


class RepeatsLast(NGramProposer):
    """The newest token again, up to the limit."""

    def propose(self, sequences, limits):
        return [[seq.token_ids[-1]] * limit for seq, limit in zip(sequences, limits, strict=True)]


class ForTheFirstAlone(RepeatsLast):
    def propose(self, sequences, limits):
        return super().propose(sequences[:1], limits[:1])


class TooLong(RepeatsLast):
    def propose(self, sequences, limits):
        return super().propose(sequences, [limit + 1 for limit in limits])


class BeyondTheVocabulary(RepeatsLast):
    def propose(self, sequences, limits):
        return [[10**6] for _ in sequences]


class ForgetsNothing(NGramProposer):
    def forget(self, seq):
        pass


class ForgetsOnce(NGramProposer):
    def forget(self, seq):
        del self._indices[seq]


class ChangesSequences(NGramProposer):
    def propose(self, sequences, limits):
        grow(sequences[0], 1)
        return super().propose(sequences, limits)


class DependsOnItsAge(RepeatsLast):
    ages = itertools.count()

    def propose(self, sequences, limits):
        return [[next(self.ages) % 5] for _ in sequences]


def test_a_proposer_that_keeps_its_invariants_passes_and_is_counted():
    metrics = check_proposer(NGramProposer, num_speculative_tokens=3)
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    assert check_proposer(f"{__name__}:RepeatsLast").num_draft_tokens > metrics.num_draft_tokens


@pytest.mark.parametrize(
    ("proposer", "error", "invariant"),
    [
        (ForTheFirstAlone, InvalidTypeError, "a draft for each of its"),
        (TooLong, InvalidValueError, r"at most limits\[i\] ids"),
        (BeyondTheVocabulary, InvalidValueError, "the model has no other ids"),
        (ForgetsNothing, AssertionError, r"must keep no Sequence after forget\(seq\)"),
        (ForgetsOnce, AssertionError, "must accept sequences that it does not know: it raised KeyError"),
        (ChangesSequences, AssertionError, "must not change the tokens of a sequence"),
        (DependsOnItsAge, AssertionError, "must propose the same drafts in the same run again"),
        ("ngram", AssertionError, "method must be a class or its name, got 'ngram'"),
        (dict, InvalidTypeError, r"forget\(seq\), got <class 'dict'>"),
    ],
    ids=str,
)
def test_a_violated_invariant_is_named(proposer, error, invariant):
    with pytest.raises(error, match=invariant):
        check_proposer(proposer)
