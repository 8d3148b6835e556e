"""Drafts from earlier text: what followed the longest n-gram, where it occurred last."""

from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.ngram import NGramIndex, NGramProposer
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence


def continuation_by_definition(ids, sizes, limit):
    for size in reversed(sizes):
        for start in range(len(ids) - size - 1, -1, -1):
            if size < len(ids) and ids[start : start + size] == ids[-size:]:
                grown = list(ids)
                while len(grown) < len(ids) + limit:  # copied one by one, as LZ77 does: what was copied may be copied again
                    grown.append(grown[start + size + len(grown) - len(ids)])
                return grown[len(ids) :]
    return []


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    low=st.integers(1, 3),
    more=st.integers(0, 2),
    limit=st.integers(1, 9),
    first=st.integers(1, 40),
)
def test_a_draft_continues_the_longest_ngram_from_where_it_occurred_last(ids, low, more, limit, first):
    sizes = range(low, low + more + 1)
    index = NGramIndex(sizes)
    for end in range(min(first, len(ids)), len(ids) + 1):  # the text grows by one token at a time
        assert index.continuation(ids[:end], limit) == continuation_by_definition(ids[:end], sizes, limit)


def test_each_sequence_has_an_index_until_it_is_forgotten():
    proposer = NGramProposer(SpeculativeConfig(method="ngram"))
    first, second = (
        Sequence(str(i), ids, SamplingParams(), seed=0, max_num_tokens=99)
        for i, ids in enumerate([[1, 2, 3, 1, 2], [1, 2, 4, 1, 2]])
    )
    assert proposer.propose([first, second], [1, 2]) == [[3], [4, 1]]
    proposer.forget(first)
    proposer.forget(first)
    assert proposer.propose([first], [1]) == [[3]]
