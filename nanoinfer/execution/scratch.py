"""Sequences without a scheduler, for checks that run a few steps of a model or an attention backend."""

from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence


def scratch_sequences(token_ids: list[list[int]], block_size: int) -> list[Sequence]:
    """One sequence for each list of ids. Its blocks hold all of its tokens, and follow those of the sequence before it."""
    sequences: list[Sequence] = []
    num_blocks = 0
    for i, ids in enumerate(token_ids):
        seq = Sequence(str(i), ids, SamplingParams(), seed=0, max_num_tokens=len(ids))
        first, num_blocks = num_blocks, num_blocks + -(-len(ids) // block_size)
        seq.block_table = list(range(first, num_blocks))
        sequences.append(seq)
    return sequences
