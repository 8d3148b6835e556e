"""Attention with one query at a time, by the example of AttentionMetadata."""

from nanoinfer.features.batch_invariant.single_queries import single_queries
from tests.execution.test_forward_batch import build, example


def test_every_token_of_a_chunk_is_a_sequence_that_ends_with_it():
    attention = single_queries(build(*example()).attention)
    assert attention.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert attention.seq_lens.tolist() == attention.seq_lens_cpu == [6, 1, 2, 3]
    assert attention.block_tables.tolist() == [[2, 5], [7, 0], [7, 0], [7, 0]]
    assert (attention.max_query_len, attention.num_decodes) == (1, 4)
