"""Which packed tokens of a plan reach the LM head, and which rows of prompts are read: hand-checked."""

from nanoinfer import SamplingParams
from nanoinfer.execution.executor import PromptReader
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import PromptRows, ScheduledSequence, StepPlan, prompt_rows_of, rows_of


def sequence(num_tokens, computed=0, **more):
    seq = Sequence("r", list(range(num_tokens)), SamplingParams(), 0, 99, **more)
    seq.num_computed_tokens = computed
    return seq


def test_a_chunk_that_does_not_end_its_prompt_has_no_row():
    decode, whole, chunk = sequence(5, computed=4), sequence(3), sequence(9)
    scheduled = [ScheduledSequence(decode, 1), ScheduledSequence(whole, 3), ScheduledSequence(chunk, 4)]
    assert rows_of(scheduled) == ((decode, 0), (whole, 3))
    assert rows_of([ScheduledSequence(sequence(9, computed=4), 5)])[0][1] == 4


def test_forks_have_the_row_of_their_prompt_and_drafts_each_their_own():
    parent, fork, drafting = sequence(2), sequence(2), sequence(4, computed=3)
    parent.forks = [fork]
    scheduled = [ScheduledSequence(drafting, 1, (7, 8)), ScheduledSequence(parent, 2)]
    assert rows_of(scheduled) == ((drafting, 0), (drafting, 1), (drafting, 2), (parent, 4), (fork, 4))


def test_a_step_counts_drafts_with_the_decodes():
    plan = StepPlan((ScheduledSequence(sequence(4, 3), 1, (7, 8)), ScheduledSequence(sequence(5), 5)))
    assert (plan.num_decode_tokens, plan.num_prefill_tokens) == (3, 5)


def test_drafts_are_accepted_up_to_the_first_wrong_one():
    item = ScheduledSequence(sequence(1), 1, (6, 7, 8))
    assert [item.num_accepted(sampled) for sampled in ([1, 7, 8, 9], [6, 7, 1, 9], [6, 7, 8, 9])] == [0, 2, 3]


def test_a_reader_of_an_answered_prompt_gets_the_row_before_each_of_its_tokens_and_other_readers_all_rows():
    before = ScheduledSequence(sequence(2, 1), 1, (7,))
    scored, read = sequence(5, reader=PromptReader()), sequence(5, reader=PromptReader(), is_answered=False)
    scheduled = [before, *(ScheduledSequence(one, one.num_tokens) for one in (scored, read))]
    assert prompt_rows_of(scheduled) == (PromptRows(scored, 2, 6, 0), PromptRows(read, 7, 12, 0))


def test_the_second_chunk_of_a_prompt_reads_on_where_the_first_has_ended():
    chunk = sequence(6, computed=4, reader=PromptReader())
    assert prompt_rows_of([ScheduledSequence(chunk, 2)]) == (PromptRows(chunk, 0, 1, 4),)  # the last token has no next one
    chunk.num_computed_tokens = 5
    assert prompt_rows_of([ScheduledSequence(chunk, 1)]) == ()
