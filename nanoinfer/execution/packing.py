"""Put the new tokens of a step in a row: lists of integers, without tensors.

In: a StepPlan. Out: a Packed, of which forward_batch.py makes tensors.
"""

from typing import NamedTuple

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan


class Packed(NamedTuple):
    """The input of a step as lists of integers. A query is a chunk, a sequence's newest token or a draft."""

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    query_lens: list[int]
    seq_lens: list[int]  # for each query
    sequences: list[Sequence]  # for each query


def pack(plan: StepPlan, block_size: int) -> Packed:
    """Put the new tokens of all sequences in a row, each with its position and its slot in the cache."""
    packed = Packed([], [], [], [], [], [])
    input_ids, positions, slots, query_lens, seq_lens, sequences = packed
    for item in plan.scheduled:
        seq = item.sequence
        start = seq.num_computed_tokens
        end = start + item.num_new_tokens
        input_ids += seq.token_ids[start:end] or [0]  # 0: its newest token is still being sampled
        if item.num_new_tokens == 1 and not item.draft_token_ids:  # as below, for most rows of most steps
            positions += (start,)
            slots += (seq.block_table[start // block_size] * block_size + start % block_size,)
            query_lens += (1,)
            seq_lens += (end,)
            sequences += (seq,)
            continue
        num_drafts = len(item.draft_token_ids)
        input_ids += item.draft_token_ids
        positions += range(start, end + num_drafts)
        slots += [seq.block_table[i // block_size] * block_size + i % block_size for i in range(start, end + num_drafts)]
        query_lens += [item.num_new_tokens] + [1] * num_drafts
        seq_lens += range(end, end + num_drafts + 1)
        sequences += [seq] * (num_drafts + 1)
    return packed


def first_decodes(plan: StepPlan) -> list[int]:
    """Return, for each decode, the first one of its sequence: a sequence's newest token and its drafts are decodes.

    >>> from nanoinfer.scheduling.step_plan import ScheduledSequence
    >>> seq = Sequence("r0", [5], SamplingParams(), seed=0, max_num_tokens=9)
    >>> first_decodes(StepPlan((ScheduledSequence(seq, 1), ScheduledSequence(seq, 1, (6, 7)))))
    [0, 1, 1, 1]
    """
    firsts: list[int] = []
    for item in plan.scheduled:
        if item.num_new_tokens == 1:
            firsts += [len(firsts)] * item.num_packed_tokens
    return firsts
