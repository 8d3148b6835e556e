"""The rows of a step as tensors: groups, columns, entries, and which of them are reused, hand-checked."""

import pytest
import torch

from nanoinfer.sampling.batch import PendingTokens, SamplingBatch, TokenEntries, sampled_positions
from nanoinfer.sampling.draw import uniform
from tests.helpers.sampling_rows import PARAMS, batch_of, sequence

VOCAB_SIZE = 20


def test_every_row_is_in_the_group_of_its_parameters():
    groups = batch_of([sequence(**params) for params in PARAMS.values()], VOCAB_SIZE).row_groups
    assert list(PARAMS) == ["greedy", "top_k", "top_p", "other"]
    assert (groups.greedy_rows, groups.top_k_rows, groups.top_p_rows, groups.other_rows) == ((0,), (1,), (2,), (3,))
    assert not groups.all_greedy
    assert batch_of([sequence(temperature=0)] * 2, VOCAB_SIZE).row_groups.all_greedy


def test_a_column_holds_the_value_that_changes_nothing_where_a_row_does_not_use_it():
    columns = batch_of([sequence(temperature=0, top_k=3), sequence(top_k=5, top_p=0.5), sequence()], VOCAB_SIZE)
    assert columns.top_k.tolist() == [VOCAB_SIZE, 5, VOCAB_SIZE]  # a greedy row needs none
    assert columns.top_p.tolist() == [1.0, 0.5, 1.0]
    assert columns.greedy.tolist() == [True, False, False]
    assert (columns.max_top_k, columns.min_p, columns.temperature) == (5, None, None)


@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_a_temperature_beyond_fp32_is_the_nearest_that_can_be_divided_by(temperature):
    [value] = batch_of([sequence(temperature=temperature)], VOCAB_SIZE).temperature.tolist()
    assert 0 < value < float("inf")


def test_the_random_number_of_a_row_is_that_of_its_seed_and_position():
    rows = [sequence(seed=7, prompt=(1, 2), output=(3,)), sequence(seed=8, prompt=(1,))]
    assert batch_of(rows, VOCAB_SIZE).u.tolist() == uniform([7, 8], [3, 1]).tolist()


def test_the_rows_of_drafts_follow_the_newest_token():
    one, other = sequence(prompt=(1, 2, 3)), sequence(prompt=(1,))
    assert sampled_positions([one, one, one, other]) == [3, 4, 5, 1]


def test_penalties_count_a_token_that_only_the_device_knows_and_equal_entries_have_equal_counts():
    """The second row's is new, the third counts nothing, and the last has none: its row ends."""
    rows = [sequence(prompt=(5,), output=(6, 6), presence_penalty=1), sequence(prompt=(5,), presence_penalty=1), sequence()]
    rows.append(sequence(prompt=(8,), presence_penalty=1))
    pending = PendingTokens([0, 1, 2, 3], torch.tensor([6, 9, 5, -1]))
    counts = SamplingBatch.build(rows, VOCAB_SIZE, torch.device("cpu"), pending=pending).token_counts
    entries = zip(counts.rows.tolist(), counts.ids.tolist(), counts.values.tolist(), strict=True)
    assert sorted(entries) == [(0, 5, 0), (0, 6, 3), (0, 6, 3), (1, 5, 0), (1, 9, 1), (3, 0, 1), (3, 8, 0)]


def test_lists_of_ids_become_entries_of_their_rows():
    rows = [sequence(), sequence(logit_bias={4: 2.0, 9: -1.0}), sequence(allowed_token_ids=[3, 5])]
    batch = batch_of(rows, VOCAB_SIZE)
    bias, allowed = batch.logit_bias, batch.allowed
    assert (bias.rows.tolist(), bias.ids.tolist(), bias.values.tolist()) == ([1, 1], [4, 9], [2.0, -1.0])
    assert (allowed.rows.tolist(), sorted(allowed.ids.tolist()), batch.allowed_rows.tolist()) == ([2, 2], [3, 5], [2])
    assert batch.masks_logits
    assert not batch_of(rows[:2], VOCAB_SIZE).masks_logits
    assert batch_of(rows[:2], VOCAB_SIZE).changes_logits
    assert not batch_of(rows[:1], VOCAB_SIZE).changes_logits


def test_stop_ids_are_forbidden_until_the_answer_is_long_enough():
    def forbidden(num_output):
        seq = sequence(output=[1] * num_output, min_tokens=2, stop_token_ids=[6])
        entries = batch_of([seq], VOCAB_SIZE).min_tokens
        return None if entries is None else entries.ids.tolist()

    assert [forbidden(num) for num in (0, 1, 2)] == [[6], [6], None]


def test_an_entry_is_read_and_written_where_its_row_and_id_say():
    logits = torch.arange(12.0).view(3, 4)
    entries = TokenEntries(torch.tensor([0, 2]), torch.tensor([3, 1]))
    assert entries.read(logits).tolist() == [3.0, 9.0]
    entries.write(logits, torch.tensor([-1.0, -2.0]))
    assert logits[0, 3] == -1
    assert logits[2, 1] == -2
    assert logits.sum() == sum(range(12)) - 3 - 9 - 3


def test_some_rows_have_their_own_columns_and_random_numbers():
    batch = batch_of([sequence(top_k=3), sequence(temperature=0.5), sequence(top_p=0.5)], VOCAB_SIZE)
    picked = batch.only_rows(torch.tensor([2, 0]))
    assert picked.top_k.tolist() == [VOCAB_SIZE, 3]
    assert picked.top_p.tolist() == [0.5, 1.0]
    assert picked.u.tolist() == batch.u[[2, 0]].tolist()
