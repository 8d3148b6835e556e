"""Turn scheduled sequences into the packed tensors of one step: the new tokens of all sequences in a row, without padding.

In: a StepPlan. Out: a ForwardBatch. AttentionMetadata's docstring has an example.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.execution.packing import first_decodes, pack
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.system.transfer import integers_on_device

# The extras of a sequence (Sequence.extras), its first packed token, and the token after its last.
ExtraRuns = tuple[tuple[Mapping[str, object], int, int], ...]


class BatchLists(NamedTuple):
    """The numbers of a ForwardBatch, before they are tensors. Every rank makes tensors of its own (features/distributed)."""

    input_ids: list[int]  # 0 for a token that only the device knows
    positions: list[int]
    query_start_loc: list[int]
    seq_lens: list[int]
    query_lens: list[int]
    block_tables: list[int]  # of all queries, each padded to the length of the longest
    slots: list[int]
    logits_indices: list[int]
    first_decodes: list[int]  # empty if each decode has a sequence of its own
    num_decodes: int
    max_num_decodes: int  # of a sequence
    block_copies: list[tuple[int, int]]
    extras: ExtraRuns

    @classmethod
    def of(cls, plan: StepPlan, block_size: int) -> "BatchLists":
        """Pack the tokens of a plan."""
        packed = pack(plan, block_size)
        query_start_loc = [0, *accumulate(packed.query_lens)]
        runs = zip(packed.sequences, query_start_loc, query_start_loc[1:], strict=False)
        firsts = first_decodes(plan) if plan.has_further_rows else []
        return cls(
            input_ids=packed.input_ids,
            positions=packed.positions,
            query_start_loc=query_start_loc,
            seq_lens=packed.seq_lens,
            query_lens=packed.query_lens,
            block_tables=padded([seq.block_table for seq in packed.sequences]),
            slots=packed.slots,
            logits_indices=[index for _, index in plan.rows],
            first_decodes=firsts,
            num_decodes=plan.num_decode_tokens,
            max_num_decodes=max(map(firsts.count, set(firsts)), default=1),
            block_copies=list(plan.block_copies),
            extras=tuple((seq.extras, start, stop) for seq, start, stop in runs if seq.extras),
        )


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of a step."""

    input_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    # the packed indices of the tokens whose hidden rows enter the LM head, in the order of plan.rows, or a slice of all tokens
    logits_indices: Int[Tensor, " num_rows"] | slice
    attention: AttentionMetadata
    block_copies: list[tuple[int, int]]
    # the extras of the sequences that have some, for what wraps the runner or begin_step. They reach every rank
    extras: ExtraRuns = ()
    lists: BatchLists | None = None  # what the tensors were made of. None: for a batch of captured or steady steps

    @classmethod
    def build(cls, plan: StepPlan, block_size: int, device: torch.device) -> "ForwardBatch":
        """Make the tensors of a plan. The id of a token that only the device knows is 0."""
        return cls.of(BatchLists.of(plan, block_size), device)

    @classmethod
    def of(cls, lists: BatchLists, device: torch.device) -> "ForwardBatch":
        """Make the tensors of these numbers."""
        num_rows, num_queries = len(lists.logits_indices), len(lists.seq_lens)
        has_all_rows = lists.logits_indices == list(range(len(lists.input_ids)))
        ids, positions, starts, lens, tables, slots, rows, firsts = integers_on_device(
            [
                lists.input_ids, lists.positions, lists.query_start_loc, lists.seq_lens, lists.block_tables, lists.slots,
                [] if has_all_rows else lists.logits_indices, lists.first_decodes,
            ],
            device,
        )  # fmt: skip
        attention = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=tables.view(num_queries, -1),
            slot_mapping=slots,
            max_query_len=max(lists.query_lens),
            max_seq_len=max(lists.seq_lens),
            num_decodes=lists.num_decodes,
            query_start_loc_cpu=lists.query_start_loc,
            seq_lens_cpu=lists.seq_lens,
            first_decodes=firsts if lists.first_decodes else None,
            max_num_decodes=lists.max_num_decodes,
        )
        return cls(
            ids, positions, slice(0, num_rows) if has_all_rows else rows, attention, lists.block_copies, lists.extras, lists
        )


def padded(tables: list[list[int]]) -> list[int]:
    """Join block tables, each padded with 0 to the length of the longest."""
    max_blocks = max(map(len, tables))
    padded: list[int] = []
    for table in tables:
        padded += table + [0] * (max_blocks - len(table))
    return padded
