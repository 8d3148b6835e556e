"""Every pair of features: the answers of the features one at a time, or refused by an error that names both."""

import pytest

from nanoinfer import NanoinferError
from tests.features import engines
from tests.features.covering import (
    COMMAND,
    FEATURES,
    MARKED,
    NAMES,
    PAGE,
    covering_array,
    has_exact_scores,
    known_refusals,
    known_runs,
    pairs_of,
    pairs_of_features,
    run_of,
    with_most_pairs,
    with_table,
)
from tests.features.engines import Checkpoints, Oracle, Question
from tests.helpers import forked

pytestmark = pytest.mark.slow

REFUSALS = known_refusals()
RUNS = known_runs()
NOW = with_most_pairs(RUNS, 4)  # all of them take minutes
RENEW = f"renew the table: {COMMAND}"
# Features that change the answers, and whose absence the comparison must find.
CHANGING = ["adapter per request", "structured output", "required calls", "n > 1", "own stages", "own processors"]


def names_of(run):
    return ", ".join(value for value in run.values() if value)


@pytest.fixture(scope="module", autouse=True)
def forked_ranks():
    with forked.ranks():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def oracle(checkpoints):
    return Oracle(checkpoints)


def tokens_of(answers):
    return [[answer.token_ids for answer in several] for several in answers]


@pytest.mark.parametrize(
    "run", [pytest.param(run, id=names_of(run), marks=[pytest.mark.long] * (run not in NOW)) for run in RUNS]
)
def test_features_together_give_the_answers_of_each_alone(checkpoints, oracle, run):
    questions, expected = oracle.questions(run)
    try:
        answers, num_found = engines.computed(checkpoints, run, questions)
    except NanoinferError as error:
        pytest.fail(f"refused, but not in the table. {RENEW} ({error})")
    assert tokens_of(answers) == expected
    assert not run["disk"] or num_found > 0
    if has_exact_scores(run):
        assert answers == engines.answers_alone(checkpoints, run, questions)


@pytest.mark.parametrize("pair", REFUSALS, ids=" with ".join)
def test_a_refused_pair_has_the_error_in_the_table_which_names_both(checkpoints, pair):
    error = engines.refusal(checkpoints, run_of(*pair))
    assert error == REFUSALS[pair], RENEW
    assert [feature for feature in pair if not any(name in error for name in NAMES[feature])] == []


@pytest.mark.parametrize("feature", CHANGING)
def test_a_feature_that_is_ignored_is_found(checkpoints, oracle, feature):
    run = run_of(feature)
    questions, expected = oracle.questions(run)
    without = [Question(question.number, None) for question in questions]
    ignoring = run if feature == "adapter per request" else run_of()
    assert tokens_of(engines.computed(checkpoints, ignoring, without)[0]) != expected


def test_a_lifted_refusal_is_found_and_its_pair_gets_a_run(checkpoints):
    assert engines.refusal(checkpoints, run_of("eager", "priority")) is None  # a record of this pair would not be equal
    one, other = lifted = ("drafts: n-gram", "async scheduling")
    runs = covering_array(REFUSALS.keys() - {lifted})
    assert any({one, other} <= set(run.values()) for run in runs)
    assert not any({one, other} <= set(run.values()) for run in RUNS)


def test_every_pair_is_refused_or_in_a_run():
    covered = {(one, other) for run in RUNS for (_, one), (_, other) in pairs_of(run)}
    assert [pair for pair in pairs_of_features() if (pair in covered) == (pair in REFUSALS)] == [], RENEW
    assert len(covered) > len(FEATURES) * 10
    assert len(RUNS) <= 60


def test_the_page_shows_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert "| beam search | adapter per request, " in MARKED.search(page)[0]
    assert with_table(page, REFUSALS, RUNS) == page, RENEW
    unknown = dict(list(REFUSALS.items())[1:])
    assert with_table(page, unknown, RUNS) != page
