"""A plan as the tensors of a step: the example of AttentionMetadata, drafts, forks and placeholders, by hand."""

import torch

from nanoinfer import SamplingParams
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.local_executor import fill_in
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of

CPU = torch.device("cpu")


def sequence(tokens, computed=0, table=(), **given):
    seq = Sequence("r", list(tokens), SamplingParams(), 0, 99, **given)
    seq.num_computed_tokens, seq.block_table = computed, list(table)
    return seq


def plan_of(*scheduled):
    return StepPlan(scheduled, rows=rows_of(scheduled))


def build(*scheduled):
    return ForwardBatch.build(plan_of(*scheduled), 4, CPU)


def ids_after(rows, token_ids, *scheduled):
    """The ids of a step after a step with these rows, which has sampled these tokens."""
    plan = plan_of(*scheduled)
    input_ids = ForwardBatch.build(plan, 4, CPU).input_ids
    fill_in(input_ids, plan, StepPlan((), rows=tuple((seq, 0) for seq in rows)), token_ids)
    return input_ids.tolist()


def example():
    """The first sequence decodes its 6th token, and the second prefills 3 tokens."""
    decoding, prompt = sequence([9, 8, 7, 6, 5, 4], computed=5, table=[2, 5]), sequence([1, 2, 3], table=[7])
    return ScheduledSequence(decoding, 1), ScheduledSequence(prompt, 3)


def test_the_example_of_the_metadata():
    batch = build(*example())
    attention = batch.attention
    assert batch.input_ids.tolist() == [4, 1, 2, 3]
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert batch.logits_indices.tolist() == [0, 3]
    assert attention.query_start_loc.tolist() == attention.query_start_loc_cpu == [0, 1, 4]
    assert attention.seq_lens.tolist() == attention.seq_lens_cpu == [6, 3]
    assert attention.block_tables.tolist() == [[2, 5], [7, 0]]
    assert attention.slot_mapping.tolist() == [21, 28, 29, 30]
    assert (attention.max_query_len, attention.max_seq_len, attention.num_decodes) == (3, 6, 1)


def test_a_draft_is_a_query_of_its_sequence_at_the_next_position():
    batch = build(ScheduledSequence(sequence([1, 2, 3], computed=2, table=[6, 2]), 1, (30, 31)))
    assert batch.input_ids.tolist() == [3, 30, 31]
    assert batch.positions.tolist() == [2, 3, 4]
    assert batch.logits_indices == slice(0, 3)  # the rows of all tokens
    assert batch.attention.slot_mapping.tolist() == [26, 27, 8]
    assert batch.attention.seq_lens.tolist() == [3, 4, 5]
    assert batch.attention.block_tables.tolist() == [[6, 2]] * 3


def test_a_chunk_in_the_middle_of_a_prompt_has_its_positions_and_no_row():
    batch = build(ScheduledSequence(sequence(range(10), computed=4, table=[3, 1, 2]), 4))
    assert batch.input_ids.tolist() == batch.positions.tolist() == [4, 5, 6, 7]
    assert batch.attention.slot_mapping.tolist() == [4, 5, 6, 7]
    assert batch.logits_indices.tolist() == []


def test_a_token_that_only_the_device_knows_is_taken_from_the_step_before():
    known, pending = sequence([5, 6], computed=1, table=[0]), sequence([1, 2, 3], computed=3, table=[1])
    pending.num_tokens = 4
    scheduled = ScheduledSequence(known, 1), ScheduledSequence(pending, 1)
    assert ids_after([sequence([7]), pending, known], torch.tensor([40, 41, -1]), *scheduled) == [6, 41]
    assert build(*scheduled).positions.tolist() == [1, 3]


def test_a_step_of_the_rows_of_the_step_before_reads_its_tokens_in_the_order_of_the_rows():
    rows = [sequence([1, 2, 3], computed=3, table=[i]) for i in range(3)]
    for seq in rows:
        seq.num_tokens = 4
    token_ids = torch.tensor([40, -1, 42])
    for used, expected in ((rows, [40, 0, 42]), (rows[::-1], [42, 0, 40]), (rows[:2], [40, 0])):
        assert ids_after(rows, token_ids, *(ScheduledSequence(seq, 1) for seq in used)) == expected
    assert token_ids.tolist() == [40, -1, 42]


def test_extras_are_runs_of_packed_tokens():
    mine = {"adapter": object()}
    plain, adapted = sequence([1, 2], table=[0]), sequence([3, 4, 5], table=[1], extras=mine)
    assert build(ScheduledSequence(plain, 2), ScheduledSequence(adapted, 3)).extras == ((mine, 2, 5),)
