"""Log-probabilities beside a token: values in float64, order, ranks among ties, and which logits the sampler uses."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.features.logprobs.token_logprobs import token_logprobs
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow
from tests.helpers.sampling_rows import sampling_by

INF = math.inf


def entry_of(logits, token_id, num_top):
    return token_logprobs(torch.tensor([logits]), [token_id], [num_top])[0]


def sequence(seed=0, prompt=(0,), output=(), **params):
    seq = Sequence("r", list(prompt), SamplingParams(max_tokens=None, **params), seed, 999)
    grow(seq, *output)
    return seq


def sample(logits, *sequences, processed=False, mode=None):
    """The output of the plain stages, which the fast route must give as well."""
    batch, mode = (
        SamplingBatch.build([*sequences], logits.shape[1], logits.device),
        mode or ("processed" if processed else "raw"),
    )
    samplers = (sampling_by(*routes, logprobs_mode=mode) for routes in ((), (FewLogits(),)))
    plain, fast = (sampler(logits.clone(), batch).read() for sampler in samplers)
    assert plain == fast
    logprobs = {row: report.logprobs for row, report in plain.reports.items() if report.logprobs}
    return SimpleNamespace(token_ids=plain.token_ids, logprobs=logprobs)


def assert_entry_is(entry, logits, token_id, num_top):
    """entry follows the definition for one row of logits: values as in float64, ranks by fp32 logprobs.

    (Rounding makes equal logprobs of logits that differ in their last bits.)
    """
    assert entry.ids[0] == token_id
    assert len(entry.ids) == len(set(entry.ids)) == len(entry.values) == len(entry.ranks)
    expected = logits.double().log_softmax(-1)[entry.ids]
    torch.testing.assert_close(torch.tensor(entry.values, dtype=torch.float64), expected, atol=2e-6, rtol=1e-6)
    logprobs = logits.log_softmax(-1)
    rising = logprobs.sort().values
    num_smaller = torch.searchsorted(rising, logprobs[entry.ids])
    assert entry.ranks == (len(logits) - num_smaller).tolist()
    # the other ids are the most probable: falling, and no id outside is more probable than the last of them
    others = logprobs[entry.ids[1:]].tolist()
    assert others == sorted(others, reverse=True)
    left_out = logprobs.index_fill(0, torch.tensor(entry.ids), -INF).amax().item()
    assert left_out <= min(others, default=INF)
    if len(entry.ids) == num_top:  # the token is itself one of the k likeliest
        assert int((logprobs > logprobs[token_id]).sum()) < num_top
    else:  # it is not, or k of its equals come before it
        assert len(entry.ids) == num_top + 1
        assert int((logprobs >= logprobs[token_id]).sum()) > num_top


# ---- worked examples


def test_the_worked_example_of_the_docstring_and_a_vocabulary_of_one_id():
    entry = entry_of([math.log(0.5), math.log(0.25), math.log(0.25)], 2, 1)
    assert (entry.ids, entry.ranks) == ([2, 0], [3, 1])
    assert entry.values == pytest.approx([math.log(0.25), math.log(0.5)])
    for num_top in (0, 1):
        entry = entry_of([7.0], 0, num_top)
        assert (entry.ids, entry.values, entry.ranks) == ([0], [0.0], [1])


def test_equal_ids_share_the_larger_rank_and_come_in_rising_order_when_all_are_returned():
    logits = [5.0, 1.0, 1.0, 1.0, 0.0]
    assert entry_of(logits, 0, 2).ranks == [1, 4]  # also when most of them are beyond k
    assert entry_of(logits, 2, 5).ranks == [4, 1, 4, 4, 5]
    assert entry_of([0.0, 1.0, 1.0, 0.0, 1.0], 4, 5).ids == [4, 1, 2, 0, 3]
    entry = entry_of([0.0, -INF, 0.0, -INF], 0, 4)  # a masked id has log-probability minus infinity and the last rank
    assert (entry.ids, entry.ranks) == ([0, 2, 1, 3], [2, 2, 4, 4])
    assert entry.values == [pytest.approx(math.log(0.5))] * 2 + [-INF] * 2


# ---- against float64


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocab_size", [2, 50, 5000])
def test_entries_of_random_rows_agree_with_float64(vocab_size, rounded):
    """Rounded logits tie, at and beyond the k-th too. Rows of one call have different values of num_top."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(60, vocab_size, generator=generator) * torch.tensor([0.1, 1.0, 8.0]).repeat(20)[:, None]
    logits = (logits * 4).round() / 4 if rounded else logits
    token_ids = torch.randint(0, vocab_size, (60,), generator=generator)
    token_ids[::2] = logits[::2].argmax(-1)
    num_top = [min((0, 1, 5, 20, vocab_size)[i % 5], vocab_size) for i in range(60)]
    entries = token_logprobs(logits, token_ids.tolist(), num_top)
    for row, entry in enumerate(entries):
        assert_entry_is(entry, logits[row], int(token_ids[row]), num_top[row])


@settings(max_examples=100)
@given(
    row=st.lists(st.sampled_from([-INF, -2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=8).filter(lambda row: max(row) > -INF),
    data=st.data(),
)
def test_the_entry_of_any_row_of_few_values_follows_the_definition(row, data):
    token_id = data.draw(st.integers(0, len(row) - 1))
    num_top = data.draw(st.integers(0, len(row)))
    assert_entry_is(entry_of(row, token_id, num_top), torch.tensor(row), token_id, num_top)


def test_the_comparison_notices_a_wrong_id_value_rank_and_order():
    logits = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0])
    for fault in ("none", "ids", "values", "ranks", "order"):
        entry = token_logprobs(logits[None], [0], [3])[0]
        if fault == "none":
            assert_entry_is(entry, logits, 0, 3)
            continue
        if fault == "ids":
            entry.ids[2] = 0
        elif fault == "values":
            entry.values[1] += 1e-4
        elif fault == "ranks":
            entry.ranks[2] = 2  # the smallest rank of the equal ids, not the largest
        else:
            for numbers in (entry.ids, entry.values, entry.ranks):
                numbers[1], numbers[2] = numbers[2], numbers[1]
        with pytest.raises(AssertionError):
            assert_entry_is(entry, logits, 0, 3)


# ---- the sampler's

ACTING = {  # rows whose processed logits differ from the model's
    "greedy": {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {3: 9}},
    "penalties": {"repetition_penalty": 2, "frequency_penalty": 1, "presence_penalty": -1},
    "temperature": {"temperature": 0.5},
    "all": {
        "temperature": 2,
        "min_p": 0.01,
        "top_k": 9,
        "top_p": 0.9,
        "logit_bias": {1: -3},
        "allowed_token_ids": range(1, 20),
    },
}


def acting_rows(**params):
    return [sequence(seed, [1, 2], [2, 3, 3], **acting, **params) for seed, acting in enumerate(ACTING.values())]


def random_logits(num_rows=4, vocab_size=30):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 2


def test_logprobs_are_the_models_own_whatever_the_parameters_do():
    logits = random_logits()
    for num, logprobs in ((4, 4), (0, 0), (30, -1), (30, 30)):
        sampled = sample(logits, *acting_rows(logprobs=logprobs))
        assert list(sampled.logprobs) == [0, 1, 2, 3]
        for row, entry in sampled.logprobs.items():
            assert_entry_is(entry, logits[row], sampled.token_ids[row], num)


def test_processed_logprobs_are_those_after_all_stages():
    logits = random_logits()
    rows = acting_rows(logprobs=-1)
    sampled = sample(logits, *rows, processed=True)
    processed = logits.clone()
    for stage in STAGES:
        processed = stage(processed, SamplingBatch.build(rows, 30, logits.device))
    for row, entry in sampled.logprobs.items():
        assert_entry_is(entry, processed[row], sampled.token_ids[row], 30)
        assert not torch.allclose(torch.tensor(entry.values), logits[row].log_softmax(-1)[entry.ids], atol=1e-3)
    assert sum(value == -INF for value in sampled.logprobs[3].values) >= 30 - 10  # top_k 9, and perhaps a tie
    assert -INF not in sampled.logprobs[2].values


def test_logprobs_by_hand():
    """p = [.5 .25 .15 .1]: top_k 2 leaves 2/3 and 1/3. A greedy row keeps temperature 1, its bias acts."""
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log().repeat(2, 1)
    rows = [sequence(top_k=2, logprobs=-1), sequence(temperature=0, top_k=2, logit_bias={1: 100}, logprobs=1)]
    sampled = sample(logits, *rows, processed=True)
    values = dict(zip(sampled.logprobs[0].ids, sampled.logprobs[0].values, strict=True))
    assert values == {0: pytest.approx(math.log(2 / 3)), 1: pytest.approx(math.log(1 / 3)), 2: -INF, 3: -INF}
    greedy = sampled.logprobs[1]
    assert (greedy.ids, greedy.ranks) == ([1], [1])
    assert greedy.values == [pytest.approx(0, abs=1e-6)]
    raw = sample(logits[:1], rows[1]).logprobs[0]  # the model's of the token that the bias chose
    assert (raw.ids, raw.ranks) == ([1, 0], [2, 1])
    assert raw.values == pytest.approx([math.log(0.25), math.log(0.5)])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logits_can_be_returned_in_the_place_of_log_probabilities(mode):
    logits, rows = random_logits(2), [sequence(i, logprobs=30, temperature=0.5, top_k=3) for i in range(2)]
    logprobs = sample(logits, *rows, mode=mode)
    returned = sample(logits, *rows, mode=f"{mode}_logits")
    assert returned.token_ids == logprobs.token_ids
    for row in range(2):
        of_logits, of_logprobs = returned.logprobs[row], logprobs.logprobs[row]
        assert (of_logits.ids, of_logits.ranks) == (of_logprobs.ids, of_logprobs.ranks)
        expected = torch.tensor(of_logits.values).log_softmax(-1)  # of all 30 ids
        torch.testing.assert_close(torch.tensor(of_logprobs.values), expected)
        if mode == "raw":
            assert of_logits.values == [logits[row, token_id].item() for token_id in of_logits.ids]


@pytest.mark.parametrize("processed", [False, True])
def test_only_rows_with_logprobs_and_a_token_return_them_and_logprobs_change_no_token(processed):
    logits = random_logits().repeat(2, 1)
    returning, silent = acting_rows(logprobs=2), acting_rows()
    mixed = sample(logits, *returning, *silent, processed=processed)
    assert list(mixed.logprobs) == [0, 1, 2, 3]
    assert mixed.token_ids == sample(logits, *silent, *silent, processed=processed).token_ids
    assert sample(logits, *silent, *silent, processed=processed).logprobs == {}
    logits[1, 4] = math.nan  # a row without a token
    sampled = sample(logits[:3], *[sequence(i, logprobs=30) for i in range(3)], processed=processed)
    assert list(sampled.logprobs) == [0, 2]
    assert sampled.token_ids[1] == -1
    for row in (0, 2):
        assert_entry_is(sampled.logprobs[row], logits[row], sampled.token_ids[row], 30)
