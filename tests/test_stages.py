"""Each stage by its worked example, against transformers' warpers, against a brute-force oracle, and in mixed batches."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as oracle

from nanoinfer import SamplingParams
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import integer_weights
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.sampling.stages import apply_temperature, keep_min_p, keep_top_k, keep_top_p, mask_min_tokens
from nanoinfer.sequence import Sequence

INF = math.inf


def asked(*rows, vocab_size=6, eos=frozenset()):
    """The batch of rows that asked for these parameters, each with a prompt of one token and no output yet."""
    sequences = [
        Sequence("r", [0], SamplingParams(**{"seed": i} | row), seed=i, max_num_tokens=99, eos_token_ids=eos)
        for i, row in enumerate(rows)
    ]
    return SamplingBatch.build(sequences, vocab_size, torch.device("cpu"))


def kept(stage, probabilities, **params):
    """The ids that a stage keeps of a distribution."""
    logits = torch.tensor([probabilities]).log()
    return stage(logits, asked(params, vocab_size=len(probabilities)))[0].isfinite().nonzero()[:, 0].tolist()


def all_stages(logits, batch):
    for stage in STAGES:
        logits = stage(logits, batch)
    return logits


# ---- worked examples


@pytest.mark.parametrize(
    ("stage", "params", "probabilities", "expected"),
    [
        (keep_min_p, {"min_p": 0.5}, [0.5, 0.3, 0.2], [0, 1]),
        (keep_min_p, {"min_p": 0.5}, [0.5, 0.25, 0.25], [0, 1, 2]),  # at the bar is not below it
        (keep_min_p, {"min_p": 1.0}, [0.25, 0.5, 0.25], [1]),
        (keep_top_k, {"top_k": 2}, [0.3, 0.2, 0.2, 0.2, 0.1], [0, 1, 2, 3]),
        (keep_top_k, {"top_k": 2}, [0.1, 0.2, 0.4, 0.3], [2, 3]),
        (keep_top_k, {"top_k": 1}, [0.1, 0.4, 0.1, 0.4], [1, 3]),
        (keep_top_k, {"top_k": 100}, [0.5, 0.0, 0.5], [0, 2]),
        (keep_top_p, {"top_p": 0.6}, [0.5, 0.3, 0.2], [0, 1]),
        (keep_top_p, {"top_p": 0.5}, [0.5, 0.25, 0.25], [0]),
        (keep_top_p, {"top_p": 0.5}, [0.25, 0.25, 0.25, 0.25], [0, 1]),  # equal probabilities enter in id order
        (keep_top_p, {"top_p": 0.6}, [0.25, 0.5, 0.25], [0, 1]),
        (keep_top_p, {"top_p": 5e-324}, [0.25, 0.25, 0.5], [2]),
        (keep_top_p, {"top_p": 1.0}, [0.9, 0.1, 1e-30], [0, 1, 2]),  # off is off, even for hopeless tokens
        (all_stages, {"top_p": 0.75, "min_p": 0.3}, [0.40, 0.25, 0.20, 0.05, 0.05, 0.05], [0, 1]),
    ],
)
def test_the_worked_example_keeps_what_it_says(stage, params, probabilities, expected):
    assert kept(stage, probabilities, **params) == expected


def test_the_order_of_the_stages_is_seen_in_the_result():
    def transformers_order(logits, batch):
        return keep_min_p(keep_top_p(logits, batch), batch)

    probabilities = [0.40, 0.25, 0.20, 0.05, 0.05, 0.05]
    assert kept(transformers_order, probabilities, top_p=0.75, min_p=0.3) == [0, 1, 2]


def test_temperature_divides_after_the_maximum_is_taken_off():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert apply_temperature(logits, asked({"temperature": 0.5})).tolist() == [[0.0, -2.0, -4.0]]
    assert apply_temperature(logits, asked({"temperature": 4.0})).tolist() == [[0.0, -0.25, -0.5]]


def test_min_tokens_masks_eos_and_stop_ids_of_its_row_alone():
    batch = asked({"min_tokens": 1, "stop_token_ids": [3]}, {"stop_token_ids": [3]}, {"min_tokens": 2}, eos=frozenset([1, 5]))
    masked = mask_min_tokens(torch.zeros(3, 6), batch)
    assert masked.tolist() == [[0, -INF, 0, -INF, 0, -INF], [0] * 6, [0, -INF, 0, 0, 0, -INF]]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_nobody_asked_for_returns_its_input(stage):
    logits = torch.randn(2, 6)
    assert stage(logits, asked({}, {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5})) is logits


# ---- against transformers


def random_rows(num_rows=300):
    """Rows of up to 512 logits; every third is rounded to eighths, so that it holds ties."""
    generator = torch.Generator().manual_seed(0)
    for i in range(num_rows):
        vocab_size = int(torch.randint(2, 513, (), generator=generator))
        logits = torch.randn(1, vocab_size, generator=generator) * (0.3, 1.0, 3.0, 8.0)[i % 4]
        yield ((logits * 8).round() / 8 if i % 3 == 0 else logits), torch.rand((), generator=generator).item()


def test_temperature_gives_transformers_distribution():
    for logits, x in random_rows():
        temperature = 0.05 + 3 * x
        theirs = oracle.TemperatureLogitsWarper(temperature)(None, logits)
        ours = apply_temperature(logits, asked({"temperature": temperature}))
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=1e-4)


def test_top_k_keeps_what_transformers_keeps_ties_included():
    num_ties = 0
    for logits, x in random_rows():
        k = 1 + int(x * logits.shape[1])
        ours = keep_top_k(logits, asked({"top_k": k}, vocab_size=logits.shape[1]))
        assert torch.equal(ours, oracle.TopKLogitsWarper(k)(None, logits))
        num_ties += int(ours.isfinite().sum() > k)
    assert num_ties > 50  # the comparison saw ties


def compare_min_p(stage):
    """Masks may differ only for tokens within 1e-6 of the bar."""
    for logits, x in random_rows():
        min_p = x**2  # more of them small, as in use
        ours = stage(logits, asked({"min_p": min_p}))
        theirs = oracle.MinPLogitsWarper(min_p)(None, logits)
        ratio = (logits.double() - logits.double().amax()).exp()
        excused = (ratio / min_p - 1).abs() < 1e-6
        assert torch.equal(ours.masked_fill(excused, 0), theirs.masked_fill(excused, 0))


def compare_top_p(stage):
    """As many tokens are kept, with the same logits; one more or less only where the exact sum is within 1e-6 of top_p.

    Which of equal tokens stay is left out: transformers' sort does not keep their order.
    """
    for logits, top_p in random_rows():
        ours = stage(logits, asked({"top_p": top_p}))
        theirs = oracle.TopPLogitsWarper(top_p)(None, logits)
        assert torch.equal(ours[ours > -INF], logits[ours > -INF])
        falling = logits[0].sort(descending=True).values
        num_ours, num_theirs = sorted((int((ours > -INF).sum()), int((theirs > -INF).sum())))
        assert num_ours > 0
        assert torch.equal(ours[ours > -INF].sort(descending=True).values, falling[: int((ours > -INF).sum())])
        if num_ours != num_theirs:
            sums = falling.double().softmax(-1).cumsum(-1)[num_ours - 1 : num_theirs - 1]
            assert (sums - top_p).abs().max() < 1e-6


def test_min_p_keeps_what_transformers_keeps():
    compare_min_p(keep_min_p)


def test_top_p_keeps_what_transformers_keeps():
    compare_top_p(keep_top_p)


def test_the_comparison_notices_a_bar_that_is_not_scaled_by_the_largest_probability():
    with pytest.raises(AssertionError):
        compare_min_p(lambda logits, batch: logits.masked_fill(logits.softmax(-1) < batch.min_p[:, None], -INF))


def wrong_top_p(logits, batch, *, shifted):
    """The two known traps: `cumsum > p` as it stands drops the token that crosses p; shifted, it keeps one more at equality."""
    falling, ids = logits.sort(descending=True, stable=True)
    p = falling.softmax(-1)
    dropped = p.cumsum(-1) - (p if shifted else 0) > batch.top_p[:, None]
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), -INF)


def test_the_comparison_notices_a_dropped_token_that_crosses_top_p():
    with pytest.raises(AssertionError):
        compare_top_p(lambda logits, batch: wrong_top_p(logits, batch, shifted=False))


def test_the_example_at_equality_notices_one_token_too_many():
    assert kept(lambda logits, batch: wrong_top_p(logits, batch, shifted=True), [0.5, 0.25, 0.25], top_p=0.5) == [0, 1]


# ---- against brute force

few_logits = st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0]), min_size=1, max_size=12).filter(
    lambda row: max(row) > -INF
)


@settings(max_examples=300, deadline=None)
@given(row=few_logits, top_p=st.one_of(st.floats(5e-324, 1), st.sampled_from([1 / 3, 0.25, 0.5, 0.75, 2 / 3])))
def test_top_p_keeps_the_smallest_set_in_order_of_weight_and_id(row, top_p):
    logits = torch.tensor([row])
    weights = integer_weights(logits)[0].tolist()
    order, expected = sorted(range(len(row)), key=lambda i: (-row[i], i)), []
    while not expected or sum(weights[i] for i in expected) < top_p * sum(weights):
        expected.append(order[len(expected)])
    survivors = keep_top_p(logits, asked({"top_p": top_p}))[0]
    if top_p < 1:
        assert survivors.isfinite().nonzero()[:, 0].tolist() == sorted(i for i in expected if row[i] > -INF)
    else:
        assert torch.equal(survivors, logits[0])


@settings(max_examples=200, deadline=None)
@given(row=few_logits, top_k=st.integers(1, 14))
def test_top_k_keeps_everything_as_large_as_the_kth(row, top_k):
    kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
    expected = [value if value >= kth else -INF for value in row]
    assert keep_top_k(torch.tensor([row]), asked({"top_k": top_k}, vocab_size=len(row)))[0].tolist() == expected


choices = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 1e-300, 0.3, 1.0, 7.0, 1e300]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    }
)


@settings(max_examples=300, deadline=None)
@given(row=few_logits, params=choices)
def test_a_masked_token_never_comes_back_and_the_largest_always_stays(row, params):
    logits, batch = torch.tensor([row]), asked(params, vocab_size=len(row))
    for stage in STAGES:
        masked = stage(logits, batch)
        assert not masked.isnan().any()
        assert not (masked[logits == -INF] > -INF).any()
        assert masked[0, max(range(len(row)), key=row.__getitem__)] > -INF
        logits = masked


# ---- mixed batches


def test_a_row_of_a_mixed_batch_is_treated_bit_for_bit_as_when_alone():
    rng, vocab_size = random.Random(0), 300
    rows = [
        {
            "temperature": rng.choice([0.2, 0.7, 1.0, 1.3, 5.0]),
            "min_p": rng.choice([0, 0, 0.02, 0.3]),
            "top_k": rng.choice([0, 0, 1, 10, 40, 299]),
            "top_p": rng.choice([1, 1, 0.2, 0.9, 0.999]),
            "min_tokens": rng.choice([0, 1]),
        }
        for _ in range(64)
    ]
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    logits[::2] = logits[::2].bfloat16().float()  # ties
    together = all_stages(logits, asked(*rows, vocab_size=vocab_size, eos=frozenset([7])))
    for i, row in enumerate(rows):
        alone = all_stages(logits[i : i + 1], asked(row, vocab_size=vocab_size, eos=frozenset([7])))
        assert torch.equal(alone[0], together[i])
    assert len({int(row.isfinite().sum()) for row in together}) > 10  # rows do differ
