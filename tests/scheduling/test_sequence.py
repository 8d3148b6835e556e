"""A Sequence's counts: prompt, chunk, decode step and recomputation differ in nothing but them."""

import pytest

from nanoinfer import SamplingParams
from nanoinfer.execution.executor import PromptReader
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow


def sequence(prompt=(5, 6, 7), index=0, reader=None, **params):
    return Sequence("r0", list(prompt), SamplingParams(**params), seed=0, max_num_tokens=19, index=index, reader=reader)


def test_a_prompt_a_decode_step_and_a_recomputation_are_the_tokens_that_are_not_in_the_cache():
    seq = sequence()
    assert (seq.num_tokens, seq.num_new_tokens, seq.num_output_tokens) == (3, 3, 0)
    seq.num_computed_tokens = 3
    grow(seq, 8)
    assert (seq.num_tokens, seq.num_new_tokens, seq.num_output_tokens) == (4, 1, 1)
    seq.num_computed_tokens = 0  # preempted
    assert (seq.num_new_tokens, seq.output_token_ids) == (4, [8])


def test_a_token_that_only_the_device_knows_counts_as_a_token_and_not_as_output():
    seq = sequence()
    seq.num_computed_tokens, seq.num_tokens = 3, 4
    assert (seq.num_tokens, seq.num_new_tokens, seq.num_output_tokens) == (4, 1, 0)


def test_the_first_answer_has_the_requests_name_and_two_sequences_are_never_equal():
    assert [sequence(index=i).sequence_id for i in (0, 1)] == ["r0", "r0.1"]
    assert sequence() != sequence()


def test_the_first_answer_alone_needs_all_rows_of_its_prompt_and_once():
    assert not sequence().needs_all_rows
    seq = sequence(reader=PromptReader())
    assert seq.needs_all_rows
    assert not sequence(reader=PromptReader(), index=1).needs_all_rows
    grow(seq, 8)
    assert not seq.needs_all_rows  # it was preempted after its first token


@pytest.mark.parametrize(
    ("params", "reads"),
    [
        ({}, False),
        ({"top_k": 3, "logit_bias": {1: 2.0}}, False),
        ({"frequency_penalty": 1.0}, True),
        ({"logits_processors": [print]}, True),
    ],
)
def test_the_next_token_waits_for_this_one_only_if_sampling_reads_the_output(params, reads):
    assert (sequence(**params).num_free_tokens == 0) == reads


def test_stop_ids_are_the_models_and_the_requests():
    seq = Sequence("r", [1], SamplingParams(stop_token_ids=[4]), 0, 9, eos_token_ids=frozenset([2]))
    assert seq.stop_ids == {2, 4}
