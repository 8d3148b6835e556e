"""When a repetition ends an answer, by hand-checked answers. tests/sampling/test_stages.py has what bad words mask."""

import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.inputs import InputProcessor
from nanoinfer.engine.request import Request
from nanoinfer.engine.stopping import Stop
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.structured.words import WordsFeature
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.fake_executor import FakeExecutor

EOS, STOP_ID, OTHER = 2, 7, 5
TWICE = {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}


def prepared(**params):
    inputs = InputProcessor(FakeExecutor().info, None, EngineConfig(), features=[WordsFeature(None, 9)])
    return inputs.prepare([OTHER, STOP_ID], SamplingParams(detokenize=False, **params))


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
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
    ],
)
def test_a_pattern_in_a_row_ends_the_answer_last_of_all(output, params, expected):
    given = prepared(**params)
    seq = Sequence("r", [OTHER, STOP_ID], given.params, 0, 9, frozenset([EOS]), constraints=given.constraints)
    request = Request([seq], None, None)
    for token_id in output:
        seq.token_ids.append(token_id)
        stop = request.advance(seq, token_id)
    assert stop == expected
    assert seq.num_free_tokens  # nothing waits for the tokens


def test_bad_words_of_ids_are_in_the_vocabulary_and_those_of_text_need_a_tokenizer():
    assert prepared(bad_words=[[1, 8]]).constraints[0].words == ((1, 8),)
    with pytest.raises(InvalidValueError, match="bad_words has the token id 9"):
        prepared(bad_words=[[1, 9]])
    with pytest.raises(InvalidValueError, match="there is no tokenizer"):
        prepared(bad_words=["a"])
