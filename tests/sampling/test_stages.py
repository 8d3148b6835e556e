"""Each stage by worked examples, by brute force, and on 1,536 rows of mixed batches against transformers."""

import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as oracle

from nanoinfer import SamplingParams
from nanoinfer.errors import InvalidTypeError
from nanoinfer.features.structured.words import word_constraints
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import integer_weights
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.sampling.stages import apply_temperature, keep_min_p, keep_top_k, keep_top_p
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow

INF = math.inf


def batch_of(*rows, vocab_size=6, eos=frozenset()):
    """The batch of rows with these parameters, each with a prompt of one token and no output yet."""
    sequences = [
        Sequence("r", [0], SamplingParams(**{"seed": i} | row), seed=i, max_num_tokens=99, eos_token_ids=eos)
        for i, row in enumerate(rows)
    ]
    return SamplingBatch.build(sequences, vocab_size, torch.device("cpu"))


def sequence(prompt, output=(), *, bad_words=(), eos=frozenset(), **params):
    params = SamplingParams(max_tokens=None, bad_words=bad_words, **params)
    constraints = tuple(word_constraints(params, None, 1000))
    seq = Sequence("r", list(prompt), params, 0, 999, eos, constraints=constraints)
    grow(seq, *output)
    return seq


def changed(stage, logits, *sequences):
    """Apply a stage to the same row of logits for each sequence."""
    logits = torch.tensor([logits]).repeat(len(sequences), 1)
    return stage(logits, SamplingBatch.build(list(sequences), logits.shape[1], logits.device)).tolist()


def kept(stage, probabilities, **params):
    """The ids that a stage keeps of a distribution."""
    logits = torch.tensor([probabilities]).log()
    return stage(logits, batch_of(params, vocab_size=len(probabilities)))[0].isfinite().nonzero()[:, 0].tolist()


def all_stages(logits, batch):
    for stage in STAGES:
        logits = stage(logits, batch)
    return logits


# ---- worked examples


@pytest.mark.parametrize(
    ("stage", "params", "probabilities", "expected"),
    [
        (keep_min_p, {"min_p": 0.5}, [0.5, 0.3, 0.2], [0, 1]),
        (keep_min_p, {"min_p": 0.5}, [0.5, 0.25, 0.25], [0, 1, 2]),  # at the threshold is not below it
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


def test_temperature_divides_after_the_maximum_is_subtracted():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert apply_temperature(logits, batch_of({"temperature": 0.5})).tolist() == [[0.0, -2.0, -4.0]]
    assert apply_temperature(logits, batch_of({"temperature": 4.0})).tolist() == [[0.0, -0.25, -0.5]]


def test_a_bad_word_is_masked_at_its_last_token_if_its_other_tokens_end_the_output():
    words = ((3, 1, 2), (0,))
    outputs = ([], [1], [1, 3], [3, 1], [2, 3, 1], [3, 1, 0])
    rows = changed(stages.mask_bad_words, [0.0] * 4, *[sequence([1], output, bad_words=words) for output in outputs])
    assert [row[2] == -INF for row in rows] == [False, False, False, True, True, False]
    assert all([row[0], row[1], row[3]] == [-INF, 0, 0] for row in rows)  # a word of one token is masked always


def test_the_frequency_penalty_counts_output_tokens_and_the_presence_penalty_does_not():
    """Id 0 is in the prompt only, id 1 in both, id 2 in the output only, id 3 in neither."""
    seq = sequence([0, 1, 0], [1, 2, 2, 2], frequency_penalty=0.5, presence_penalty=2)
    assert changed(stages.apply_frequency_penalty, [1.0] * 4, seq) == [[1, 0.5, -0.5, 1]]
    assert changed(stages.apply_presence_penalty, [1.0] * 4, seq) == [[1, -1, -1, 1]]


@pytest.mark.parametrize(
    ("size", "token_ids", "banned"),
    [
        (2, [5, 6, 5], [6]),
        (2, [5, 5], [5]),
        (2, [5, 6, 5, 4, 5], [4, 6]),
        (2, [5], []),
        (1, [5, 6, 5], [5, 6]),  # every token of the history
        (3, [1, 2, 3, 1, 2], [3]),
        (3, [1, 2, 3, 2, 1], []),
        (4, [1, 2, 3], []),  # shorter than an n-gram
        (4, [1, 2, 3, 0, 1, 2, 3], [0]),
    ],
)
@pytest.mark.parametrize("num_output", [0, 1])  # prompt and output are one history
def test_an_ngram_is_completed_once(size, token_ids, banned, num_output):
    middle = len(token_ids) - num_output
    seq = sequence(token_ids[:middle], token_ids[middle:], no_repeat_ngram_size=size)
    row = changed(stages.mask_repeated_ngrams, [0.0] * 7, seq)[0]
    assert [i for i, logit in enumerate(row) if logit == -INF] == banned


def test_logits_processors_are_called_in_order_with_copies_of_the_ids_and_the_logits_of_their_row():
    def first(prompt_ids, output_ids, logits):
        calls.append((list(prompt_ids), list(output_ids), logits.tolist()))
        prompt_ids.clear()
        output_ids.append(99)
        return logits + 1

    def second(prompt_ids, output_ids, logits):
        calls.append((list(prompt_ids), list(output_ids), logits.tolist()))
        return (logits * 2).double()  # another dtype is allowed

    calls = []
    seq = sequence([0, 1], [2], logits_processors=[first, second])
    assert changed(stages.apply_logits_processors, [3.0, 4.0], sequence([0]), seq, sequence([0])) == [[3, 4], [8, 10], [3, 4]]
    assert calls == [([0, 1], [2], [3, 4]), ([0, 1], [2], [4, 5])]
    assert seq.token_ids == [0, 1, 2]


@pytest.mark.parametrize("returned", [None, torch.zeros(2), torch.zeros(1, 3), [0.0, 0.0, 0.0]])
def test_a_logits_processor_that_returns_something_else_raises(returned):
    seq = sequence([0], logits_processors=[lambda prompt_ids, output_ids, logits: returned])
    with pytest.raises(InvalidTypeError, match=r"must return logits of shape \(3,\)"):
        changed(stages.apply_logits_processors, [0.0] * 3, seq)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logit_bias": {1: -3}, "repetition_penalty": 2}, -2),  # bias, then repetition: (2 - 3) * 2, not 2 / 2 - 3
        ({"repetition_penalty": 2, "frequency_penalty": 2}, -3),  # 2 / 2 - 2 * 2, not (2 - 4) * 2
        ({"repetition_penalty": 2, "presence_penalty": 2}, -1),  # 2 / 2 - 2, not (2 - 2) / 2
        ({"logit_bias": {1: 100}, "allowed_token_ids": [0]}, -INF),
        ({"logit_bias": {1: 100}, "min_tokens": 9, "stop_token_ids": [1]}, -INF),
        ({"logit_bias": {1: 1}, "logits_processors": [lambda p, o, logits: logits * 10]}, 30),  # of the changed logits
        ({"no_repeat_ngram_size": 1, "logits_processors": [lambda p, o, logits: logits.clamp(min=-7)]}, -7),  # runs last
        ({"logits_processors": [lambda p, o, logits: logits - 1], "temperature": 0.5}, -8),  # (2 - 6) / 0.5, after it
        ({"presence_penalty": 1, "temperature": 0.5}, -10),  # (2 - 1 - 6) / 0.5
    ],
)
def test_the_stages_follow_the_order_of_the_page(params, expected):
    """Id 1 has logit 2 and is twice in the output. Id 0 has 6 and is the largest."""
    assert changed(all_stages, [6.0, 2.0], sequence([1], [1, 1], **params))[0][1] == expected


@pytest.mark.parametrize("penalty", [1e-50, 1e-38, 1e38, 1e300])
def test_an_extreme_repetition_penalty_makes_no_nan_of_masked_and_zero_logits(penalty):
    row = changed(stages.apply_repetition_penalty, [0.0, -INF, 1.0], sequence([0, 1], repetition_penalty=penalty))[0]
    assert row == [0, -INF, 1]


@pytest.mark.parametrize("stage", STAGES)
def test_an_unused_stage_returns_its_input(stage):
    logits = torch.randn(2, 6)
    assert stage(logits, batch_of({}, {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5})) is logits


# ---- against transformers, or the definition


def random_sequence(rng, vocab_size):
    """Prompt and output of a small set of ids, so that ids and n-grams repeat. Most rows use most parameters."""

    def some(most):
        return rng.sample(range(vocab_size), rng.randint(1, min(vocab_size, most)))

    def perhaps(value, off):
        return value if rng.random() < 0.75 else off

    pool = some(6)
    prompt, output = rng.choices(pool, k=rng.randint(1, 9)), rng.choices(pool, k=rng.randint(0, 9))
    bad_words = [tuple(rng.choices(pool, k=rng.randint(1, 3))) for _ in range(3)]
    bad_words.append((*(prompt + output)[-rng.randint(1, 3) :], rng.randrange(vocab_size)))  # may reach into the prompt
    return sequence(
        prompt,
        output,
        bad_words=perhaps(tuple(bad_words), ()),
        eos=frozenset(perhaps(some(2), ())),
        allowed_token_ids=perhaps(some(vocab_size), None),
        min_tokens=perhaps(rng.randint(1, 14), 0),
        stop_token_ids=some(3),
        logit_bias=perhaps({token_id: rng.uniform(-100, 100) for token_id in some(40)}, None),
        repetition_penalty=perhaps(rng.choice([rng.uniform(0.2, 1), rng.uniform(1, 3)]), 1.0),
        frequency_penalty=perhaps(rng.uniform(-2, 2), 0.0),
        presence_penalty=perhaps(rng.uniform(-2, 2), 0.0),
        no_repeat_ngram_size=perhaps(rng.randint(1, 4), 0),
        logits_processors=perhaps([scaled_by_history, dropping_last], None),
        temperature=rng.choice([0.0, 1.0, *(0.05 + 3 * rng.random() for _ in range(6))]),
        min_p=perhaps(rng.random() ** 2, 0.0),  # more of them small, as in use
        top_k=perhaps(rng.randint(1, vocab_size + 2), 0),
        top_p=perhaps(rng.choice([rng.random(), rng.random(), 1e-6, 0.999]) or 0.5, 1.0),
    )


def scaled_by_history(prompt_ids, output_ids, logits):
    return logits * (1 + sum(prompt_ids)) - len(output_ids)


def dropping_last(prompt_ids, output_ids, logits):
    return logits.index_fill(0, torch.tensor([(prompt_ids + output_ids)[-1]]), -INF)


@functools.cache
def mixed_batches():
    """24 batches of 64 rows over 2 to 512 ids: (sequences, logits, batch).

    Every third row is rounded to eighths, so that it holds ties. Every fifth has masked tokens already.
    """
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    batches = []
    for i in range(24):
        vocab_size = rng.randint(2, 512) if i % 4 else rng.randint(2, 12)
        sequences = [random_sequence(rng, vocab_size) for _ in range(64)]
        logits = torch.randn(64, vocab_size, generator=generator) * torch.tensor([0.3, 1.0, 3.0, 8.0]).repeat(16)[:, None]
        logits[::3] = (logits[::3] * 8).round() / 8
        masked = torch.rand(64, vocab_size, generator=generator) < 0.3
        masked[:, rng.randrange(vocab_size)] = False
        logits[::5] = logits[::5].masked_fill(masked[::5], -INF)
        batches.append((sequences, logits, SamplingBatch.build(sequences, vocab_size, logits.device)))
    return batches


def compare(stage, is_on, check):
    """Call check(ours [1, vocab], params, seq, logits [1, vocab]) for rows that use the stage. Other rows keep every bit."""
    num_on = num_changed = 0
    for sequences, logits, batch in mixed_batches():
        ours = stage(logits.clone(), batch)
        same = (ours.view(torch.int32) == logits.view(torch.int32)).all(dim=-1).tolist()
        for i, seq in enumerate(sequences):
            if is_on(seq.params, seq):
                check(ours[i : i + 1], seq.params, seq, logits[i : i + 1])
                num_on, num_changed = num_on + 1, num_changed + (not same[i])
            else:
                assert same[i]
    assert num_on >= 750
    assert num_changed >= 375  # the stage changed something


def equal_to(oracle_of):
    """A check for equal bits. oracle_of(params, seq) is one of transformers' processors and its input ids."""

    def check(ours, params, seq, logits):
        processor, input_ids = oracle_of(params, seq)
        assert torch.equal(ours, processor(torch.tensor([input_ids], dtype=torch.int64), logits.clone()))

    return check


# stage -> (whether a row uses it, transformers' processor and the ids that it is called with)
ORACLES = {
    stages.keep_allowed: (
        lambda params: params.allowed_token_ids is not None,
        lambda params, seq: (oracle.SuppressTokensLogitsProcessor(set(range(512)) - set(params.allowed_token_ids)), []),
    ),
    # Before 5.18 the oracle skips a word that is longer than the ids. Ids that match nothing before them prevent that.
    stages.mask_bad_words: (
        lambda params: params.bad_words,
        lambda params, seq: (
            oracle.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]),
            [-1] * max(map(len, params.bad_words)) + seq.output_token_ids,
        ),
    ),
    stages.mask_min_tokens: (
        lambda params: params.min_tokens,
        lambda params, seq: (
            oracle.MinNewTokensLengthLogitsProcessor(
                len(seq.prompt_token_ids), params.min_tokens, [*seq.eos_token_ids, *params.stop_token_ids]
            ),
            seq.token_ids,
        ),
    ),
    stages.add_logit_bias: (
        lambda params: params.logit_bias,
        lambda params, seq: (
            oracle.SequenceBiasLogitsProcessor({(i,): value for i, value in params.logit_bias.items()}),
            seq.token_ids,
        ),
    ),
    stages.apply_repetition_penalty: (
        lambda params: params.repetition_penalty != 1,
        lambda params, seq: (oracle.RepetitionPenaltyLogitsProcessor(params.repetition_penalty), seq.token_ids),
    ),
    stages.mask_repeated_ngrams: (
        lambda params: params.no_repeat_ngram_size,
        lambda params, seq: (oracle.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size), seq.token_ids),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ORACLES)
def test_a_stage_of_single_tokens_changes_what_transformers_changes(stage):
    is_on, oracle_of = ORACLES[stage]
    compare(stage, lambda params, seq: is_on(params), equal_to(oracle_of))


def penalized(penalty_of):
    """A check: penalty_of(params, count) is subtracted from the logits of the output's ids, all others are unchanged."""

    def check(ours, params, seq, logits):
        expected = logits.double()
        for token_id in set(seq.output_token_ids):
            expected[0, token_id] -= penalty_of(params, seq.output_token_ids.count(token_id))
        torch.testing.assert_close(ours.double(), expected, atol=2e-6, rtol=1e-6)
        untouched = [i for i in range(logits.shape[1]) if i not in seq.output_token_ids]
        assert torch.equal(ours[0, untouched], logits[0, untouched])

    return check


def test_penalties_are_subtracted_once_per_occurrence_or_once_per_id_in_the_output():
    check = penalized(lambda params, count: params.frequency_penalty * count)
    compare(stages.apply_frequency_penalty, lambda params, seq: params.frequency_penalty, check)
    check = penalized(lambda params, count: params.presence_penalty)
    compare(stages.apply_presence_penalty, lambda params, seq: params.presence_penalty, check)


def test_the_comparison_notices_a_frequency_penalty_on_the_prompt():
    def on_all_tokens(logits, batch):
        penalty = torch.tensor([seq.params.frequency_penalty for seq in sequences[id(batch)]])
        counts = torch.stack([torch.tensor(seq.token_ids).bincount(minlength=logits.shape[1]) for seq in sequences[id(batch)]])
        return logits - penalty[:, None] * counts

    sequences = {id(batch): rows for rows, _, batch in mixed_batches()}
    with pytest.raises(AssertionError):
        compare(
            on_all_tokens,
            lambda params, seq: params.frequency_penalty,
            penalized(lambda params, count: params.frequency_penalty * count),
        )


def test_temperature_gives_transformers_distribution():
    def check(ours, params, seq, logits):
        theirs = oracle.TemperatureLogitsWarper(params.temperature)(None, logits)
        torch.testing.assert_close(ours, theirs - theirs.amax(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=1e-4)

    compare(apply_temperature, lambda params, seq: params.temperature not in (0, 1), check)


def test_top_k_keeps_what_transformers_keeps_ties_included():
    def check(ours, params, seq, logits):
        assert torch.equal(ours, oracle.TopKLogitsWarper(params.top_k)(None, logits))
        num_ties.append(int(ours.isfinite().sum() > params.top_k))

    num_ties = []
    compare(keep_top_k, lambda params, seq: params.top_k and params.temperature > 0, check)
    assert sum(num_ties) > 75  # the comparison saw ties


def compare_min_p(stage):
    """Masks may differ only for tokens within 1e-6 of the threshold."""

    def check(ours, params, seq, logits):
        theirs = oracle.MinPLogitsWarper(params.min_p)(None, logits)
        ratio = (logits.double() - logits.double().amax()).exp()
        excused = (ratio / params.min_p - 1).abs() < 1e-6
        assert torch.equal(ours.masked_fill(excused, 0), theirs.masked_fill(excused, 0))

    compare(stage, lambda params, seq: params.min_p and params.temperature > 0, check)


def compare_top_p(stage):
    """The same number of tokens is kept, with the same logits. It may differ where the exact sum is within 1e-6 of top_p.

    Which of equal tokens are kept is not compared: transformers' sort does not keep their order.
    """

    def check(ours, params, seq, logits):
        theirs = oracle.TopPLogitsWarper(params.top_p)(None, logits)
        survivors = ours > -INF
        assert torch.equal(ours[survivors], logits[survivors])
        falling = logits[0].sort(descending=True).values
        num_ours, num_theirs = int(survivors.sum()), int((theirs > -INF).sum())
        assert num_ours > 0
        assert torch.equal(ours[survivors].sort(descending=True).values, falling[:num_ours])
        if num_ours != num_theirs:
            sums = falling.double().softmax(-1).cumsum(-1)[min(num_ours, num_theirs) - 1 : max(num_ours, num_theirs) - 1]
            assert (sums - params.top_p).abs().max() < 1e-6

    compare(stage, lambda params, seq: params.top_p < 1 and params.temperature > 0, check)


def test_min_p_keeps_what_transformers_keeps():
    compare_min_p(keep_min_p)


def test_top_p_keeps_what_transformers_keeps():
    compare_top_p(keep_top_p)


def test_the_comparison_notices_a_threshold_that_is_not_scaled_by_the_largest_probability():
    with pytest.raises(AssertionError):
        compare_min_p(lambda logits, batch: logits.masked_fill(logits.softmax(-1) < batch.min_p[:, None], -INF))


def wrong_top_p(logits, batch):
    """The known trap: `cumsum > p` drops the token that crosses p."""
    falling, ids = logits.sort(descending=True, stable=True)
    dropped = (falling.softmax(-1).cumsum(-1) > batch.top_p[:, None]) & (batch.top_p < 1)[:, None]
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), -INF)


def test_the_comparison_notices_a_dropped_token_that_crosses_top_p():
    with pytest.raises(AssertionError):
        compare_top_p(wrong_top_p)


# ---- where transformers differs, and where it might seem to


def test_a_bad_word_begun_in_the_prompt_is_not_masked_where_transformers_masks_it():
    theirs = oracle.NoBadWordsLogitsProcessor([[1, 2]])(torch.tensor([[0, 1]]), torch.zeros(1, 4))
    assert theirs.tolist() == [[0, 0, -INF, 0]]
    assert changed(stages.mask_bad_words, [0.0] * 4, sequence([0, 1], bad_words=((1, 2),))) == [[0] * 4]
    assert changed(stages.mask_bad_words, [0.0] * 4, sequence([0], [1], bad_words=((1, 2),))) == [[0, 0, -INF, 0]]


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 5e-324])
def test_a_tiny_temperature_does_not_overflow_where_transformers_does(temperature):
    assert oracle.TemperatureLogitsWarper(temperature)(None, torch.tensor([[9.0, 7.0]])).softmax(-1).isnan().all()
    ours = changed(apply_temperature, [9.0, 7.0, 9.0], sequence([0], temperature=temperature))[0]
    assert ours[0] == ours[2] == 0
    assert math.exp(ours[1]) == 0


# ---- against brute force

tied_logits = st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0]), min_size=1, max_size=12).filter(
    lambda row: max(row) > -INF
)


@settings(max_examples=150, deadline=None)
@given(row=tied_logits, top_p=st.one_of(st.floats(5e-324, 1), st.sampled_from([1 / 3, 0.25, 0.5, 0.75, 2 / 3])))
def test_top_p_keeps_the_smallest_set_in_order_of_weight_and_id(row, top_p):
    logits = torch.tensor([row])
    weights = integer_weights(logits)[0].tolist()
    order, expected = sorted(range(len(row)), key=lambda i: (-row[i], i)), []
    while not expected or sum(weights[i] for i in expected) < top_p * sum(weights):
        expected.append(order[len(expected)])
    survivors = keep_top_p(logits, batch_of({"top_p": top_p}))[0]
    if top_p < 1:
        assert survivors.isfinite().nonzero()[:, 0].tolist() == sorted(i for i in expected if row[i] > -INF)
    else:
        assert torch.equal(survivors, logits[0])


choices = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 1e-300, 0.3, 1.0, 7.0, 1e300]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    }
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(row=tied_logits, params=choices)
def test_a_masked_token_never_comes_back_and_the_largest_always_stays(row, params):
    logits, batch = torch.tensor([row]), batch_of(params, vocab_size=len(row))
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
    together = all_stages(logits, batch_of(*rows, vocab_size=vocab_size, eos=frozenset([7])))
    for i, row in enumerate(rows):
        alone = all_stages(logits[i : i + 1], batch_of(row, vocab_size=vocab_size, eos=frozenset([7])))
        assert torch.equal(alone[0], together[i])
    assert len({int(row.isfinite().sum()) for row in together}) > 10  # rows do differ
