"""What a step of a model with windows or states reads of its sequences, by hand."""

from dataclasses import replace

from nanoinfer.features.batch_invariant.single_queries import single_queries
from nanoinfer.features.hybrid.groups import groups_of
from nanoinfer.features.hybrid.states import StateUpdate, updates_of
from nanoinfer.features.hybrid.tables import HybridTables
from nanoinfer.scheduling.step_plan import ScheduledSequence
from tests.execution.test_forward_batch import build, sequence


def with_tables(seq, *tables):
    seq.extras = {"hybrid": HybridTables(*tables)}
    return seq


def test_a_further_kv_group_has_its_own_blocks_and_slots():
    first = with_tables(sequence(range(6), computed=5, table=[2, 5]), [[-1, 3]])
    other = with_tables(sequence(range(3), table=[7]), [[1]])
    batch = build(ScheduledSequence(first, 1), ScheduledSequence(other, 3))
    own, group = groups_of(batch, 4)
    assert own is batch.attention
    assert group.seq_lens is own.seq_lens
    assert (own.block_tables.tolist(), group.block_tables.tolist()) == ([[2, 5], [7, 0]], [[-1, 3], [1, 0]])
    assert own.slot_mapping.tolist() == [5 * 4 + 1, 28, 29, 30]
    assert group.slot_mapping.tolist() == [3 * 4 + 1, 4, 5, 6]


def test_states_are_read_and_written_after_so_many_tokens_and_drafts_of_the_step():
    plain, seq = sequence([1], table=[0]), with_tables(sequence(range(10), computed=4, table=[0, 1, 2]), [], 7, {8: 5, 10: 6})
    batch = build(ScheduledSequence(plain, 1), ScheduledSequence(seq, 6))
    assert updates_of(batch) == [StateUpdate(1, 7, 7, {4: 5, 6: 6})]
    assert updates_of(replace(batch, attention=single_queries(batch.attention))) == updates_of(batch)
    seq = with_tables(sequence([1, 2, 3], computed=2, table=[0, 1]), [], 4, {3: 4, 4: 5, 5: 6})
    assert updates_of(build(ScheduledSequence(seq, 1, (30, 31)))) == [StateUpdate(0, 3, 4, {1: 4, 2: 5, 3: 6})]  # with drafts
