"""A proposer of the user's own in the engine: how it is given, what is refused of it, and that no request is lost by it."""

import logging

import numpy as np
import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidTypeError, InvalidValueError, NanoinferError
from nanoinfer.features.drafts.checked import CheckedProposer
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.ngram import NGramProposer
from nanoinfer.features.drafts.speculator import Proposer
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.tiny_models import assert_nothing_is_left


class Planned(Proposer):
    """Proposes what a test says: a list, or a function of the sequences and limits."""

    def propose(self, sequences, limits):
        return self.drafts(sequences, limits) if callable(self.drafts) else self.drafts


class WithoutForget:
    def __init__(self, config):
        pass

    def propose(self, sequences, limits):
        return [[] for _ in sequences]


class OfNothing(WithoutForget):
    def __init__(self):
        pass

    def forget(self, seq):
        pass


def test_a_method_is_a_class_or_its_name():
    for given in (NGramProposer, "nanoinfer.features.drafts.ngram:NGramProposer"):
        config = EngineArgs(speculative_config={"method": given, "num_speculative_tokens": 3}).to_config().speculative
        assert (config.method, config.num_speculative_tokens) == (NGramProposer, 3)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("my_module", "must be 'ngram', .*or a class or its name, such as 'my_module:MyProposer', got 'my_module'"),
        ("nowhere:Mine", r"got 'nowhere:Mine' \(No module named 'nowhere'\); the module must be importable"),
        ("math:Mine", r"got 'math:Mine' \(module 'math' has no attribute 'Mine'\)"),
        ("math:pi", "must be a class or its name, .*got 3.14"),
        (None, r"got None \(.*has no attribute 'propose'\)"),
        (5, "must be a class or its name, .*got 5"),
        (dict, r"forget\(seq\), got <class 'dict'> \(.*has no attribute 'propose'\); derive it from nanoinfer"),
        (WithoutForget, "has no attribute 'forget'"),
        (OfNothing, r"with __init__\(config\), .*OfNothing'> \(too many positional arguments\)"),
    ],
)
def test_what_is_no_proposer_is_refused_before_a_model_is_loaded(method, words):
    with pytest.raises(NanoinferError, match=f"speculative_config's method .*{words}"):
        SpeculativeConfig.of({"method": method})


def test_further_keys_must_be_known():
    with pytest.raises(InvalidTypeError, match="speculative_config has no 'depth'"):
        SpeculativeConfig.of({"method": Planned, "depth": 3})
    with pytest.raises(InvalidValueError, match="leave it out"):
        SpeculativeConfig.of({"method": Planned, "model": "tiny-gpt2"})


def propose(drafts, limits=(2, 3)):
    proposer = Planned(None)
    proposer.drafts = drafts
    sequences = [Sequence(str(i), [i], SamplingParams(), seed=0, max_num_tokens=9) for i in range(len(limits))]
    return CheckedProposer(proposer, vocab_size=10).propose(sequences, list(limits))


def test_right_drafts_become_lists_of_ints():
    drafts = propose([(np.int64(3),), [0]])
    assert drafts == [[3], [0]]
    assert type(drafts[0][0]) is int


@pytest.mark.parametrize(
    ("drafts", "error", "words"),
    [
        (None, InvalidTypeError, r"Planned.propose must return a list with a draft for each of its 2 sequences, got None"),
        ([[1]], InvalidTypeError, r"each of its 2 sequences, got \[\[1\]\]; return \[\]"),
        ([[1], np.array([2])], InvalidTypeError, r"must be a list of ids, got array\(\[2\]\)"),
        ([[1, 2, 3], []], InvalidValueError, r"at most limits\[i\] ids for .*, here 2, got 3; return draft\[:limit\]"),
        ([[1], [10]], InvalidValueError, r"each id that Planned.propose returns must be in 0 \.\. 9, got 10; the model has no"),
        ([[1], [-1]], InvalidValueError, r"in 0 \.\. 9, got -1"),
        ([[1.0], []], InvalidTypeError, "must be an integer, got 1.0"),
    ],
)
def test_a_wrong_draft_is_refused_in_a_sentence(drafts, error, words):
    with pytest.raises(error, match=words):
        propose(drafts)


def test_lists_that_a_proposer_changes_are_its_own():
    def clear(sequences, limits):
        sequences.clear()
        limits[:] = [9, 9]
        return [[1, 2, 3], []]

    with pytest.raises(InvalidValueError, match="here 2, got 3"):
        propose(clear)


# ---- in an engine

PROMPTS = ["Once upon a time", "Lily was"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", kv_cache_memory=2**22, speculative_config={"method": Planned, "adaptive": False})


@pytest.fixture
def planned(llm):
    """The engine's proposer, which drafts nothing before and after a test."""
    proposer = llm.engine.planner.proposer.proposer
    assert type(proposer) is Planned
    proposer.drafts = nothing
    yield proposer
    proposer.drafts = nothing
    vars(proposer).pop("forget", None)


def nothing(sequences, limits):
    return [[] for _ in sequences]


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.slow
def test_its_drafts_are_verified_like_all_others(llm, planned):
    expected = tokens(llm)
    of_prompt = {llm.get_tokenizer().encode(prompt)[0]: ids for prompt, ids in zip(PROMPTS, expected, strict=True)}

    def right(sequences, limits):
        answers = [of_prompt[seq.token_ids[0]][seq.num_output_tokens :] for seq in sequences]
        return [answer[:limit] for answer, limit in zip(answers, limits, strict=True)]

    before = llm.engine.planner.counts.num_accepted_tokens
    planned.drafts = right
    assert tokens(llm) == expected
    assert llm.engine.planner.counts.num_accepted_tokens - before > 16
    planned.drafts = lambda sequences, limits: [[0] * limit for limit in limits]
    assert tokens(llm) == expected


@pytest.mark.slow
def test_an_error_of_a_proposer_reaches_the_caller_and_no_request_is_lost(llm, planned):
    expected = tokens(llm)

    def fail(sequences, limits):
        raise ZeroDivisionError("mine")

    for drafts, error in ((fail, ZeroDivisionError), ([], InvalidTypeError)):
        planned.drafts = drafts
        with pytest.raises(error, match=r"mine|Planned.propose must return"):
            tokens(llm)
        assert_nothing_is_left(llm)
        planned.drafts = nothing
        assert tokens(llm) == expected
        requests = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        for _ in range(3):
            llm.engine.step()
        planned.drafts = drafts
        with pytest.raises(error):
            llm.engine.step()
        planned.drafts = nothing
        while llm.engine.num_unfinished:
            llm.engine.step()
        assert [request.output.outputs[0].token_ids for request in requests] == expected  # computed again
        assert_nothing_is_left(llm)


@pytest.mark.slow
def test_an_error_of_forget_is_logged_and_every_request_has_its_answer(llm, planned, caplog):
    expected = tokens(llm)
    planned.forget = {}.__getitem__
    with caplog.at_level(logging.ERROR):
        assert tokens(llm) == expected
    assert "Planned.forget failed; no answer depends on it" in caplog.text
    assert_nothing_is_left(llm)
