"""A sequence's counts: grown token by token they equal a recount, and each token is read once."""

from collections import Counter
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer import SamplingParams
from nanoinfer.features.structured.words import word_constraints
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.state import SamplingState, TokenCounts
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow


def sequence(prompt, output=(), **params):
    params = SamplingParams(max_tokens=None, **params)
    constraints = tuple(word_constraints(params, None, 9999))
    seq = Sequence("r", list(prompt), params, seed=0, max_num_tokens=9999, constraints=constraints)
    grow(seq, *output)
    return seq


def recount(seq):
    """{id: how often it is in the output} for every id of prompt + output."""
    counts = Counter(seq.output_token_ids)
    return {token_id: counts[token_id] for token_id in seq.token_ids}


def known(state):
    return dict(zip(state.token_counts.ids, state.token_counts.output_counts, strict=True))


# ---- worked examples


def test_a_field_that_the_parameters_do_not_use_is_none():
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert known(SamplingState.of(sequence([1, 2], [2], **{name: 1.1}))) == {1: 0, 2: 1}
    for params in ({"frequency_penalty": 1}, {"allowed_token_ids": [1]}, {"logit_bias": {1: 1}}):
        state = SamplingState.of(sequence([1, 2], **params))
        fields = {"frequency_penalty": state.token_counts, "allowed_token_ids": state.allowed_ids, "logit_bias": state.bias_ids}
        assert [name for name, value in fields.items() if value is not None] == list(params)


# ---- grown and recounted


@settings(max_examples=75)
@given(
    token_ids=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    num_prompt=st.integers(1, 40),
    steps=st.lists(st.integers(1, 4), min_size=40, max_size=40),  # a step may find several new tokens
)
def test_a_state_grown_in_steps_equals_one_built_at_once_and_a_recount(token_ids, num_prompt, steps):
    params = {"frequency_penalty": 1}
    prompt, output = token_ids[:num_prompt], token_ids[num_prompt:]
    grown = sequence(prompt, **params)
    while True:
        state = SamplingState.of(grown)
        at_once = SamplingState.of(sequence(prompt, grown.output_token_ids, **params))
        assert (state.token_counts.ids, state.token_counts.output_counts) == (
            at_once.token_counts.ids,
            at_once.token_counts.output_counts,
        )
        assert known(state) == recount(grown)
        if grown.output_token_ids == output:
            break
        grown.token_ids += output[grown.num_output_tokens :][: steps.pop()]


def test_the_comparison_notices_a_state_that_misses_a_token():
    seq = sequence([1, 2, 1], frequency_penalty=1)
    state = SamplingState.of(seq)
    grow(seq, 1, 3, 1)
    state._num_known += 1  # the injected fault: one token is skipped
    SamplingState.of(seq)
    assert known(state) != recount(seq)


def test_a_sequence_keeps_one_state_and_shares_it_with_no_other():
    """n answers to one prompt begin with the same ids, and continue with different ones."""
    one, other = sequence([1, 2], presence_penalty=1), sequence([1, 2], presence_penalty=1)
    state = SamplingState.of(one)
    SamplingState.of(other)
    one.token_ids.append(3)
    assert SamplingState.of(one) is state
    assert known(SamplingState.of(one)) == {1: 0, 2: 0, 3: 1}
    assert known(SamplingState.of(other)) == {1: 0, 2: 0}


# ---- the cost and the entries of a step


@pytest.mark.parametrize("length", [10, 1000])
def test_a_step_adds_each_new_token_once_however_long_the_history(length, monkeypatch):
    add, added = TokenCounts.add, []
    monkeypatch.setattr(TokenCounts, "add", lambda self, *token, **kind: added.append(token) or add(self, *token, **kind))
    seq = sequence(range(length), repetition_penalty=1.1)
    SamplingBatch.build([seq], 2000, torch.device("cpu"))
    assert len(added) == length
    for num_new in (1, 1, 1, 5, 0):
        added.clear()
        grow(seq, *[3] * num_new)
        SamplingBatch.build([seq], 2000, torch.device("cpu"))
        assert len(added) == num_new


def test_a_batch_keeps_its_entries_when_a_sequence_grows_after_it():
    """The arrays are read without a copy: growing one must not change the entries of an earlier batch."""
    seq = sequence([1, 2], frequency_penalty=1, no_repeat_ngram_size=1)
    batch = SamplingBatch.build([seq], 9999, torch.device("cpu"))
    for token_id in range(5000):
        grow(seq, token_id)
        SamplingState.of(seq)
    assert batch.token_counts.ids.tolist() == [1, 2]
    assert batch.token_counts.values.tolist() == [0, 0]
    assert batch.repeated_ngrams.ids.tolist() == [1, 2]


def test_a_batch_reuses_the_columns_of_the_last_batch_only_for_the_same_rows():
    """Equal to a batch built from nothing, in every field, whether rows stay, leave, swap or are added."""
    lists = {"no_repeat_ngram_size": 2, "logit_bias": {1: 2}, "allowed_token_ids": [2, 1, 2]}
    given = {"temperature": 0.5}, {"top_k": 3, "logprobs": 2}, {"frequency_penalty": 1} | lists
    a, b, c = (sequence([1, 2], **params) for params in given)
    greedy = sequence([1], temperature=0)
    last, device = None, torch.device("cpu")
    for rows in ([a, b], [a, b], [b, a], [b], [b, c], [b, c], [greedy], [greedy], [c]):
        for seq in rows:
            grow(seq, 3)
        last, before = SamplingBatch.build(rows, 10, device, last), last
        fresh = SamplingBatch.build(rows, 10, device)
        assert before is None or (last.of_params is before.of_params) == (last.params == before.params)
        for field in fields(SamplingBatch):
            if field.name != "draws":  # it may have the uniform numbers of later steps
                torch.testing.assert_close(plain(getattr(last, field.name)), plain(getattr(fresh, field.name)), rtol=0, atol=0)


def test_the_uniform_numbers_that_were_computed_ahead_are_those_of_each_step_alone():
    """For steps in which the rows go on, and after steps in which rows leave, return, swap or are computed again."""
    rows, device, last = [sequence([1], temperature=0.5) for _ in range(3)], torch.device("cpu"), None
    for seed, seq in enumerate(rows):
        seq.seed = seed
    num_ahead = 0
    for step in range(40):
        used = rows[step // 12 % 2 :][:: -1 if step in (5, 6) else 1]
        for seq in used:
            grow(seq, 3)
        if step % 17 == 16:
            del rows[2].token_ids[-2:]
        last = SamplingBatch.build(used, 10, device, last)
        assert torch.equal(last.u, SamplingBatch.build(used, 10, device).u)
        num_ahead += last.draws.ahead is not None
    assert 20 < num_ahead < 40


def plain(value):
    """Values that are no tensors are compared by their text."""
    if is_dataclass(value) and not isinstance(value, SamplingParams):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value if isinstance(value, torch.Tensor) else torch.tensor(list(repr(value).encode()))
